"""Golden values of text models within vision-language models, and of Ministral, from Hugging Face transformers.

    python towers.py make [NAME...]   writes families/NAME.* for tests/engine/families.rs, and of vision-language models
                                      towers/NAME for tests/checkpoint/export/towers.rs, as transformers saves them
    python towers.py check            loads what tests/checkpoint/export/towers.rs and tests/cli/towers.rs exported when they last ran

The models are as in families.py, which says what the values are. A vision-language model sees text alone; its text model's
tensors have the names of the plain class here. In towers/NAME they have those that transformers writes; `later` is the same
model under the names of its modules.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import transformers
from families import DIVIDED, GEMMA4, GEMMA4_ROPES, LENGTHS, NEW, NEXT, ORIGINAL, SIZES, VOCAB, bf16_errors, rope
from make import gradients, randomize, relative, targets_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent
IMAGE = VOCAB - 1  # no text has it
GROWN = rope("yarn", factor=4.0, beta_fast=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=1.0,
             llama_4_scaling_beta=0.7)
GEMMA3 = dict(**DIVIDED, num_hidden_layers=3, sliding_window=4, query_pre_attn_scalar=7,
              layer_types=["sliding_attention"] * 2 + ["full_attention"],
              rope_parameters=dict(full_attention=rope("linear", 50.0, factor=4.0), sliding_attention=rope("default", 20.0)))
SIGLIP = dict(hidden_size=8, intermediate_size=6, num_attention_heads=2, num_hidden_layers=1, image_size=4, patch_size=2)
CLIP = dict(model_type="clip_vision_model", projection_dim=8, **SIGLIP)
PIXTRAL = dict(model_type="pixtral", head_dim=4, **SIGLIP)
GEMMA4_VISION = dict(hidden_size=8, intermediate_size=6, num_attention_heads=2, num_key_value_heads=2, head_dim=4, num_hidden_layers=1, patch_size=2,
                     position_embedding_size=4, pooling_kernel_size=1)
QWEN_VISION = dict(depth=1, hidden_size=8, intermediate_size=6, num_heads=2, patch_size=2, out_hidden_size=18)
LLAMA4_VISION = dict(hidden_size=8, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, image_size=4, patch_size=2, vision_output_dim=8,
                     projector_input_dim=8, projector_output_dim=8)
MROPE = dict(mrope_section=[2, 2, 1])
ENDS = dict(image_token_id=IMAGE, video_token_id=IMAGE, vision_start_token_id=IMAGE, vision_end_token_id=IMAGE)

TEXTS = {
    "ministral": ("ministral", dict(num_hidden_layers=3, sliding_window=4,
                                    layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
                  dict(sliding_window=32)),
    "ministral3": ("ministral3", dict(rope_parameters=GROWN), dict(rope_parameters=GROWN | dict(llama_4_scaling_beta=0.0))),
}
# The outer keys, and those of the text model; what the case is about.
TOWERS = {
    "vl_gemma3": ("gemma3", dict(vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE), GEMMA3,
                  dict(query_pre_attn_scalar=3)),
    "vl_mistral3": ("mistral3", dict(vision_config=PIXTRAL, image_token_index=IMAGE, tie_word_embeddings=False),
                    dict(model_type="ministral3", rope_parameters=GROWN),
                    dict(rope_parameters=GROWN | dict(llama_4_scaling_beta=0.0))),
    "vl_qwen2": ("qwen2_5_vl", dict(vision_config=QWEN_VISION | dict(window_size=4, fullatt_block_indexes=[0], out_hidden_size=20), tie_word_embeddings=True, **ENDS),
                 dict(**DIVIDED, head_dim=None, num_attention_heads=2, num_key_value_heads=1,
                      rope_parameters=dict(type="mrope", rope_theta=100.0, **MROPE)),
                 dict(rope_parameters=rope("default", 10.0, **MROPE))),
    "vl_qwen3": ("qwen3_vl", dict(vision_config=QWEN_VISION | dict(num_position_embeddings=4, deepstack_visual_indexes=[0]), **ENDS),
                 dict(rope_parameters=rope("default", mrope_interleaved=True, **MROPE)),
                 dict(rope_parameters=rope("default", 10.0, **MROPE))),
    "vl_glm4v": ("glm4v", dict(vision_config=QWEN_VISION | dict(image_size=4, out_hidden_size=40), image_token_id=IMAGE, tie_word_embeddings=False),
                 dict(hidden_size=40, head_dim=None, rope_parameters=rope("default", partial_rotary_factor=0.6, mrope_section=[1, 1, 1])),
                 dict(rope_parameters=rope("default", 10.0, partial_rotary_factor=0.6, mrope_section=[1, 1, 1]))),
    "vl_llava": ("llava", dict(vision_config=CLIP, image_token_index=IMAGE), dict(**DIVIDED, model_type="llama", rope_parameters=rope("default")),
                 dict(rope_parameters=rope("default", 10.0))),
    "vl_smolvlm": ("smolvlm", dict(vision_config=SIGLIP, image_token_id=IMAGE), dict(**DIVIDED, model_type="llama", rope_parameters=rope("default")),
                   dict(rope_parameters=rope("default", 10.0))),
    "vl_qwen3_moe": ("qwen3_vl_moe", dict(vision_config=QWEN_VISION | dict(num_position_embeddings=4, deepstack_visual_indexes=[0]), **ENDS),
                     dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=14, rope_parameters=rope("default", mrope_interleaved=True, **MROPE)),
                     dict(num_experts_per_tok=1)),
    "vl_gemma4": ("gemma4", dict(vision_config=GEMMA4_VISION, audio_config=None, image_token_id=IMAGE, video_token_id=IMAGE, audio_token_id=IMAGE),
                  dict(**GEMMA4, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention="vision", pad_token_id=0),
                  dict(global_head_dim=12, rope_parameters=GEMMA4_ROPES | dict(sliding_attention=rope("default", 50.0)))),
    "vl_qwen3_5": ("qwen3_5", dict(vision_config=QWEN_VISION | dict(num_position_embeddings=4, out_hidden_size=20), **ENDS),
                   NEXT | dict(rope_parameters=rope("default", partial_rotary_factor=0.5, mrope_interleaved=True, mrope_section=[1, 1, 1])),
                   dict(rope_parameters=rope("default", 10.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 1]))),
    "vl_gemma4_experts": ("gemma4", dict(vision_config=GEMMA4_VISION, audio_config=None, image_token_id=IMAGE, video_token_id=IMAGE, audio_token_id=IMAGE),
                          dict(**GEMMA4, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention="vision", pad_token_id=0,
                               enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=14),
                          dict(top_k_experts=1)),
    "vl_llama4": ("llama4", dict(vision_config=LLAMA4_VISION, image_token_index=IMAGE, tie_word_embeddings=False),
                  dict(num_local_experts=4, intermediate_size=14, intermediate_size_mlp=22, interleave_moe_layer_step=2, no_rope_layer_interval=2,
                       attention_chunk_size=20, hidden_size=28, rope_parameters=rope("default")), dict(rope_parameters=rope("default", 10.0))),
}
# Those whose text model is one of families.py, or has experts, in which errors of bf16 say little.
ALIKE = {"vl_llama4", "vl_gemma4", "vl_gemma4_experts", "vl_llava", "vl_smolvlm", "vl_qwen3_moe"}


def build(name, more={}):
    if name in TEXTS:
        model_type, keys, _ = TEXTS[name]
        config = AutoConfig.for_model(model_type, **(SIZES | keys | more))
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model_type, outer, keys, _ = TOWERS[name]
    keys = {key: value for key, value in (SIZES | keys | more).items() if value is not None or key.endswith("token_id")}
    config = AutoConfig.for_model(model_type, text_config=keys, **outer)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return model.float().eval()


class Text(torch.nn.Module):
    """Called as a causal model, whose parameters are those of the text model under the plain class's names."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, **_):
        # Llama 4's class fails without images (transformers 5.24).
        model = self.model.language_model if self.model.config.model_type == "llama4" else self.model
        return model(input_ids=tokens, use_cache=False)

    def named_parameters(self, **_):
        for name, parameter in self.model.named_parameters():
            if name.startswith("language_model."):
                yield name.removeprefix("language_model."), parameter
            elif name.startswith(("model.language_model.", "model.text_model.", "lm_head.")):
                yield name.replace("model.language_model.", "model.").replace("model.text_model.", "model."), parameter
            elif hasattr(self.model, "model") and not hasattr(self.model.model, "language_model") and not hasattr(self.model.model, "text_model"):
                yield name, parameter


def greedy(model, prompt):
    tokens = prompt.clone()
    for _ in range(NEW):
        with torch.no_grad():
            top = model(tokens[None]).logits[0, -1].topk(2)
        assert top.values[0] - top.values[1] > 1e-4, top
        tokens = torch.cat([tokens, top.indices[:1]])
    return tokens[len(prompt):]


def errors_of_bf16(name, text, batch):
    """As families.bf16_errors."""
    import families
    families.build = lambda *_: Neighbor(build(name))
    return bf16_errors(name, None, {n: p.detach() for n, p in text.named_parameters()}, batch)


class Neighbor(Text):
    def load_state_dict(self, weights, strict):
        own = dict(self.named_parameters())
        for name, weight in weights.items():
            own[name].data.copy_(weight)

    def tie_weights(self):
        pass


def make():
    for seed, name in enumerate([*TEXTS, *TOWERS]):
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        torch.manual_seed(300 + seed)
        model = build(name)
        randomize(model)
        text = Text(model)
        tokens = torch.randint(IMAGE, (sum(LENGTHS),))
        targets = targets_of(tokens, LENGTHS)
        targets[[2, 20]] = -100
        logits, loss, grads = gradients(text, tokens, targets, LENGTHS)

        other = build(name, (TEXTS.get(name) or TOWERS[name])[-1])
        other.load_state_dict(model.state_dict())
        changed = relative(gradients(Text(other), tokens, targets, LENGTHS)[0], logits)
        assert changed > 0.003, f"{name}: what it is about changes logits by {changed:.1e} only"

        said = greedy(text, tokens[:6])
        tensors = {f"weight.{n}": p.detach().bfloat16().contiguous() for n, p in text.named_parameters()}
        tensors |= {f"grad.{n}": g.contiguous() for n, g in grads.items()}
        tensors |= {"logits": logits, "tokens": tokens.int(), "targets": targets.int(), "prompt": tokens[:6].int(),
                    "greedy": said.int()}
        save_file(tensors, HERE / "families" / f"{name}.safetensors")
        errors = None if name in ALIKE else errors_of_bf16(name, text, (tokens, targets, LENGTHS))
        golden = dict(lengths=LENGTHS, loss=loss, bf16_errors=errors,
                      config=json.loads(model.config.to_json_string(use_diff=False)),
                      made_with=f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}")
        (HERE / "families" / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")
        print(f"{name}: loss {loss:.4f}, without: {changed:.1e}, greedy {said.tolist()}")
        if name in TOWERS:
            save(name, model)


def save(name, model):
    out = HERE / "towers" / name
    shutil.rmtree(out, ignore_errors=True)
    model.bfloat16().save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "preprocessor_config.json").write_text('{"image_processor_type": "a test"}\n')


def check():
    target = HERE.parent.parent / os.environ.get("CARGO_TARGET_DIR", "target") / "tmp" / "export"
    for name in TOWERS:
        golden = load_file(HERE / "families" / f"{name}.safetensors")
        for at in filter(Path.is_dir, [target / name, target / f"{name}-later"]):
            model, report = AutoModelForImageTextToText.from_pretrained(at, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
                                                                        output_loading_info=True)
            assert not any(report.values()), report
            source = AutoModelForImageTextToText.from_pretrained(HERE / "towers" / name, dtype=torch.float32)
            with torch.no_grad():
                logits = torch.cat([Text(model)(d[None].long()).logits[0] for d in golden["tokens"].split(LENGTHS)])
            difference = relative(logits, golden["logits"])
            assert difference < 1e-5, f"{name}: logits differ by {difference:.1e}"
            carried = dict(source.named_parameters())
            for n, p in model.named_parameters():
                assert torch.equal(p, carried[n]), n
            print(f"{at.name}: {type(model).__name__} of transformers {transformers.__version__}, logits differ by {difference:.1e}")
    adapted(target.parent / "towers", golden["tokens"][None, :17].long())


def adapted(runs, tokens):
    """An adapter loads with PEFT, all of it and nothing else, and gives the logits of the merged model."""
    import warnings

    from peft import PeftModel

    load = lambda at: AutoModelForImageTextToText.from_pretrained(at, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = PeftModel.from_pretrained(load(HERE / "towers" / "vl_gemma3"), runs / "adapter").eval()
    names = {n for n, _ in model.named_parameters() if "lora_" in n}
    assert names == {n.replace(".weight", ".default.weight") for n in load_file(runs / "adapter" / "adapter_model.safetensors")}
    with torch.no_grad():
        ours, merged, base = (m(input_ids=tokens).logits for m in [model, load(runs / "merged"), load(HERE / "towers" / "vl_gemma3")])
    assert relative(ours, merged) < 1e-5 and relative(base, merged) > 1e-3, (relative(ours, merged), relative(base, merged))
    print(f"adapter: logits of PEFT and of the merged model differ by {relative(ours, merged):.1e}")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]]()

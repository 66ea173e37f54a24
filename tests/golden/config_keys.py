"""Writes config_keys.json: the keys that transformers' config class of each family has. Needs transformers.

    python config_keys.py
"""

import dataclasses
import json
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = ("llama mistral ministral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe olmoe gemma2 gemma3_text gemma4_text smollm3 olmo2 olmo3 granite "
            "seed_oss hunyuan_v1_dense exaone4 phi3 glm glm4 ernie4_5 cohere2 cohere2_moe starcoder2 gpt_oss deepseek_v2 deepseek_v3 glm4_moe_lite glm4_moe "
            "dots1 qwen3_next qwen3_5_text qwen3_5_moe_text lfm2 lfm2_moe lfm3 olmo_hybrid vaultgemma exaone_moe mellum nemotron olmo apertus bamba falcon_h1 flex_olmo afmoe falcon granitemoe_swa hy_v3 axk1 nanochat gptj codegen persimmon opt biogpt gpt_bigcode gpt_neo phi gpt_neox llama4_text phimoe gpt2")
# Classes with a vision tower, and those of their text models.
TOWERS = dict(llama4="llama4_text", gemma3="gemma3_text", gemma4="gemma4_text", mistral3="mistral", qwen2_vl="qwen2_vl_text", qwen2_5_vl="qwen2_5_vl_text",
              qwen3_vl="qwen3_vl_text", qwen3_5="qwen3_5_text", qwen3_5_moe="qwen3_5_moe_text")


def keys(name):
    config = CONFIG_MAPPING[name]
    # Those of a parent class that this one does without.
    absent = {name for name, value in vars(config).items() if isinstance(value, AttributeError)}
    return sorted({field.name for field in dataclasses.fields(config)} - absent | set(config.attribute_map))


table = {name: keys(name) for name in [*FAMILIES.split(), *TOWERS]}
table |= {f"{name}.text_config": keys(text) for name, text in TOWERS.items()}
(Path(__file__).parent / "config_keys.json").write_text(json.dumps(table, indent=1) + "\n")

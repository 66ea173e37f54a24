//! Tensor-parallel plans as transformers writes them: a style per module, by name pattern (`base_model_tp_plan`). Never
//! guesses: a plan that would compute wrong products, or needs unsupported styles, is refused with the reason.
//!
//! A plan reduces to which of four parts are sharded ([`Cuts`]) and whether norms see shards of the tokens. Two things
//! differ from transformers, with the same values: logits are never gathered (`colwise_rep`), and the gradients of head
//! norms are always summed (older plans of Gemma 3 do not say so).
use super::arch::Arch;
use super::recurrence::{DeltaForm, Recurrence};
use super::spec::Spec;
use super::split::Cuts;
use crate::base::{Error, Result};
use std::collections::BTreeMap;

/// Module pattern to style. Names are relative to the base model, as in `layers.*.mlp.up_proj`, plus `lm_head`; `*`
/// stands for a layer's number; a leading "model." is ignored.
pub type TpPlan = BTreeMap<String, String>;

/// The matrices of another mixer than attention. Plans gather their outputs, that is, they replicate what follows; here
/// its heads or channels are sharded with the heads of attention, with the same values.
fn recurrent_modules(mixer: &Recurrence, arch: Arch) -> Vec<String> {
    let modules: &[&str] = match mixer {
        Recurrence::Delta(net) => match net.form {
            DeltaForm::Mamba(_) => {
                return ["in_proj", "out_proj"].map(|of| format!("{}.{of}", arch.family().modules.mamba)).to_vec();
            }
            DeltaForm::Fused => &["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"],
            DeltaForm::Joined => &[
                "linear_attn.in_proj_qkv",
                "linear_attn.in_proj_z",
                "linear_attn.in_proj_b",
                "linear_attn.in_proj_a",
                "linear_attn.out_proj",
            ],
            DeltaForm::Apart => &[
                "linear_attn.q_proj",
                "linear_attn.k_proj",
                "linear_attn.v_proj",
                "linear_attn.g_proj",
                "linear_attn.b_proj",
                "linear_attn.a_proj",
                "linear_attn.o_proj",
            ],
        },
        Recurrence::Conv { .. } => &["conv.in_proj", "conv.out_proj"],
    };
    modules.iter().map(|module| module.to_string()).collect()
}

/// What a plan reduces to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meaning {
    pub cuts: Cuts,
    pub sequence_parallel: bool,
}

const ATTENTION: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
const AFMOE: [&str; 4] = [ATTENTION[0], ATTENTION[1], ATTENTION[2], "self_attn.gate_proj"];
const GPT_J: [&str; 3] = ["attn.q_proj", "attn.k_proj", "attn.v_proj"];
const GPT_NEO: [&str; 3] = ["attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"];
const NEMOTRON_H: [&str; 3] = ["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"];
/// Queries, keys and values from latents, which every rank has; a model without a latent of queries has a `q_proj`.
const LATENT: [&str; 2] = ["self_attn.q_b_proj", "self_attn.kv_b_proj"];
/// Queries, keys and values as one matrix; gate and up as one.
const FUSED: [&str; 3] = ["self_attn.qkv_proj", "mlp.gate_up_proj", "shared_mlp.input_linear"];
/// The style of fused matrices: each of their parts is sharded.
const PACKED: &str = "packed_colwise";

/// The modules at the beginning of a branch.
fn attention_inputs(arch: Arch) -> Vec<&'static str> {
    match arch {
        Arch::Phi3 | Arch::GptNeoX | Arch::Persimmon | Arch::Falcon | Arch::CodeGen | Arch::GptBigCode => {
            vec![arch.family().modules.qkv]
        }
        Arch::DeepseekV2 | Arch::DeepseekV3 | Arch::Axk1 | Arch::Glm4MoeLite | Arch::Youtu | Arch::MiniCpm3 => {
            LATENT.to_vec()
        }
        Arch::NemotronH => NEMOTRON_H.to_vec(),
        Arch::Afmoe => AFMOE.to_vec(),
        Arch::GptJ => GPT_J.to_vec(),
        Arch::GptNeo => GPT_NEO.to_vec(),
        _ => ATTENTION.to_vec(),
    }
}
fn mlp_inputs(arch: Arch) -> Vec<&'static str> {
    match arch {
        Arch::Phi3 | Arch::Glm | Arch::Glm4 | Arch::GraniteHybrid => vec![arch.family().modules.gate_up],
        Arch::Starcoder2
        | Arch::Arcee
        | Arch::Jais2
        | Arch::Nemotron
        | Arch::NemotronH
        | Arch::Apertus
        | Arch::NanoChat
        | Arch::Phi
        | Arch::GptJ
        | Arch::CodeGen
        | Arch::Persimmon
        | Arch::Falcon
        | Arch::Opt
        | Arch::BioGpt
        | Arch::GptBigCode
        | Arch::GptNeo
        | Arch::GptNeoX => {
            vec![arch.family().modules.mlp[0]]
        }
        _ => vec![arch.family().modules.gate, arch.family().modules.mlp[0]],
    }
}

const REPLICATE: &str = "replicate";
const HEAD_NORM: &str = "replicated_with_grad_allreduce";
/// Styles of transformers that no module of these families uses.
const ELSEWHERE: [&str; 12] = [
    "rowwise_rep",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "grouped_gemm",
    "ep_router",
    "ep_dispatch_experts",
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "all_reduce",
    "local_params",
];
const STYLES: [&str; 9] = [
    "colwise",
    "rowwise",
    "colwise_rep",
    "colwise_gather_output",
    "embedding_rowwise",
    "embedding_colwise",
    "sequence_parallel",
    HEAD_NORM,
    REPLICATE,
];

const HEAD_NORMED: [Arch; 20] = [
    Arch::HyV3,
    Arch::Afmoe,
    Arch::Apertus,
    Arch::ExaoneMoe,
    Arch::Mellum,
    Arch::Lfm2,
    Arch::Lfm2Moe,
    Arch::Lfm3,
    Arch::Qwen3Next,
    Arch::Qwen35,
    Arch::Qwen35Moe,
    Arch::Qwen3,
    Arch::Qwen3Moe,
    Arch::Qwen3VlMoe,
    Arch::Gemma3,
    Arch::Gemma4,
    Arch::HunyuanDense,
    Arch::HunyuanMoe,
    Arch::Exaone4,
    Arch::Dots1,
];

/// The plan in transformers 5 for a family: its config's plus its class's.
pub fn transformers(arch: Arch) -> TpPlan {
    let mut plan = TpPlan::new();
    let mut add = |module: &str, style: &str| plan.insert(format!("layers.*.{module}"), style.into());
    let modules = &arch.family().modules;
    let (mlp, out) = (mlp_inputs(arch), modules.mlp[1]);
    // transformers gathers the outputs of fused matrices, which is to replicate what follows.
    if !FUSED.contains(&mlp[0]) {
        mlp.iter().for_each(|module| drop(add(module, "colwise")));
        add(out, "rowwise");
    }
    if !matches!(
        arch,
        Arch::Olmoe | Arch::FlexOlmo | Arch::Olmo2 | Arch::Olmo3 | Arch::OlmoHybrid | Arch::MiniMaxM2 | Arch::Phi3
    ) {
        // OLMo normalizes all heads together.
        attention_inputs(arch).iter().for_each(|module| drop(add(module, "colwise")));
        add(modules.attention_out, "rowwise");
    }
    if HEAD_NORMED.contains(&arch) {
        modules.head_norms.iter().for_each(|module| drop(add(module, HEAD_NORM)));
    }
    plan.insert("lm_head".into(), "colwise_gather_output".into());
    plan
}

/// This engine's default: the same, plus fused matrices sharded part by part, and the embedding by vocabulary.
pub fn built_in(arch: Arch) -> TpPlan {
    let mut plan = transformers(arch);
    let modules = &arch.family().modules;
    let fused = [(attention_inputs(arch), modules.attention_out), (mlp_inputs(arch), modules.mlp[1])];
    for (inputs, out) in fused.into_iter().filter(|(inputs, _)| FUSED.contains(&inputs[0])) {
        plan.insert(in_layers(inputs[0]), PACKED.into());
        plan.insert(in_layers(out), "rowwise".into());
    }
    plan.insert(modules.embedding.into(), "embedding_rowwise".into());
    plan
}

/// Reads a plan for `spec`.
pub fn read(spec: &Spec, plan: &TpPlan) -> Result<Meaning> {
    let modules = &spec.arch.family().modules;
    let mut norms = vec![modules.last_norm.to_string()];
    let [[_, post], [_, post_mlp]] = [modules.attention_norms, modules.mlp_norms];
    let [pre, pre_mlp] = spec.arch.family().input_norms(spec);
    let before = spec.pre_norms || spec.recurrence.is_some();
    for (has, norm) in [(before, pre), (before, pre_mlp), (spec.post_norms, post)]
        .into_iter()
        .chain([(spec.norms_experts(), post_mlp)])
    {
        let norm = in_layers(norm);
        if has && !norms.contains(&norm) {
            norms.push(norm);
        }
    }
    let (mlp_out, head_norms) = (modules.mlp[1], modules.head_norms);
    let (qkv, mlp) = (attention_inputs(spec.arch), mlp_inputs(spec.arch));
    let linears = qkv.iter().chain(&mlp).chain([&modules.attention_out, &mlp_out]);
    let mut known: Vec<String> = linears.map(|module| in_layers(module)).chain(norms.iter().cloned()).collect();
    known.extend([modules.embedding, "lm_head"].map(String::from));
    if spec.qk_norm {
        known.extend(head_norms.map(in_layers));
    }
    if let Some(mixer) = &spec.recurrence {
        known.extend(recurrent_modules(mixer, spec.arch).iter().map(|module| in_layers(module)));
    }
    let plan: TpPlan = plan.iter().map(|(k, v)| (k.strip_prefix("model.").unwrap_or(k).into(), v.clone())).collect();
    for (module, style) in &plan {
        if !known.contains(module) {
            return Err(refuse(
                module,
                style,
                &format!("{} has no such module; its modules are {}", spec.arch.name(), known.join(", ")),
            ));
        }
        let fused = style == PACKED && FUSED.iter().any(|fused| in_layers(fused) == *module);
        if ELSEWHERE.contains(&style.as_str()) && !fused {
            return Err(refuse(module, style, "no module of the supported families uses this style"));
        }
        if !STYLES.contains(&style.as_str()) && !fused {
            return Err(refuse(module, style, &format!("the known styles are {}", STYLES.join(", "))));
        }
    }
    let style = |module: &str| plan.get(module).map(String::as_str).filter(|style| *style != REPLICATE);

    let attention = branch(&qkv, modules.attention_out, &|module| style(&in_layers(module)))?;
    let mlp = branch(&mlp, mlp_out, &|module| style(&in_layers(module)))?;
    for module in head_norms.map(in_layers) {
        match style(&module) {
            None => {}
            Some(HEAD_NORM) if attention => {}
            Some(HEAD_NORM) => {
                return Err(refuse(
                    &module,
                    HEAD_NORM,
                    "attention is not sharded, so each rank already has the whole gradient",
                ));
            }
            Some(other) => return Err(refuse(&module, other, "a head norm needs replicated_with_grad_allreduce")),
        }
    }
    let sequence = |module: &String| match style(module) {
        None => Ok(false),
        Some("sequence_parallel") => Ok(true),
        Some(other) => Err(refuse(
            module,
            other,
            "residual norms need sequence_parallel or replicate: every rank has their gradient",
        )),
    };
    let split: Vec<bool> = norms.iter().map(sequence).collect::<Result<_>>()?;
    let (with, without) = (split.iter().position(|s| *s), split.iter().position(|s| !*s));
    if let (Some(with), Some(without)) = (with, without) {
        let why = format!("{} is not: all residual norms must agree", norms[without]);
        return Err(refuse(&norms[with], "sequence_parallel", &why));
    }
    let embedding = match style(modules.embedding) {
        None => false,
        Some("embedding_rowwise" | "rowwise") => true,
        Some(other) => {
            return Err(refuse(
                modules.embedding,
                other,
                "the embedding is sharded by vocabulary: use embedding_rowwise",
            ));
        }
    };
    let head = match style("lm_head") {
        None => false,
        Some("colwise" | "colwise_rep" | "colwise_gather_output") => true,
        Some(other) => return Err(refuse("lm_head", other, "the head is sharded by vocabulary: use colwise_rep")),
    };
    // A tied tensor is sharded once.
    let tied = spec.tied && (embedding || head);
    let cuts = Cuts { attention, mlp, embedding: embedding || tied, head: head || tied };
    Ok(Meaning { cuts, sequence_parallel: with.is_some() })
}

fn in_layers(module: &str) -> String {
    format!("layers.*.{module}")
}
fn refuse(module: &str, style: &str, why: &str) -> Error {
    Error::input(format!("tensor-parallel plan: {module} is {style:?}, but {why}"))
}

/// Whether a branch is sharded: all of its inputs are column-parallel and its output is row-parallel, or none is.
fn branch<'a>(inputs: &[&str], out: &str, style: &dyn Fn(&str) -> Option<&'a str>) -> Result<bool> {
    for module in inputs.iter().chain([&out]) {
        let fits = match *module {
            module if module == out => "rowwise",
            module if FUSED.contains(&module) => PACKED,
            _ => "colwise",
        };
        match style(module) {
            Some(other) if other != fits => {
                let why = match other {
                    "colwise_rep" | "colwise_gather_output" if *module != out => {
                        "only the head may gather its output: the next module reads this rank's shard"
                    }
                    "sequence_parallel" => "this style is for norms, and it is a matrix",
                    _ => &format!("its branch needs {fits}"),
                };
                return Err(refuse(&in_layers(module), other, why));
            }
            _ => {}
        }
    }
    let whole = inputs.iter().find(|module| style(module).is_none());
    let cut = inputs.iter().find(|module| style(module).is_some());
    match (style(out), whole, cut) {
        (Some(style), Some(whole), _) => Err(refuse(
            &in_layers(out),
            style,
            &format!("{} before it is not colwise: it needs a sharded input", in_layers(whole)),
        )),
        (None, _, Some(cut)) => Err(refuse(
            &in_layers(cut),
            "colwise",
            &format!("{} after it is not rowwise: it would read a sharded input as whole", in_layers(out)),
        )),
        (out, ..) => Ok(out.is_some()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILIES: [Arch; 6] = [Arch::Llama, Arch::Mistral, Arch::Qwen2, Arch::Qwen3, Arch::Gemma2, Arch::Gemma3];

    fn spec(arch: Arch) -> Spec {
        let (qk_norm, post_norms) =
            (matches!(arch, Arch::Qwen3 | Arch::Gemma3), matches!(arch, Arch::Gemma2 | Arch::Gemma3));
        Spec { arch, qk_norm, post_norms, tied: post_norms, ..Spec::default() }
    }
    fn with(entries: &[(&str, &str)]) -> Result<Meaning> {
        let mut plan = transformers(Arch::Qwen3);
        entries.iter().for_each(|(module, style)| drop(plan.insert(module.to_string(), style.to_string())));
        read(&spec(Arch::Qwen3), &plan)
    }

    #[test]
    fn built_in_plans_cut_everything_and_those_of_transformers_leave_an_untied_embedding() {
        for arch in FAMILIES {
            let spec = spec(arch);
            let all = Meaning { cuts: Cuts::ALL, sequence_parallel: false };
            assert_eq!(read(&spec, &built_in(arch)).unwrap(), all, "{arch:?}");
            let theirs = Cuts { embedding: spec.tied, ..Cuts::ALL };
            assert_eq!(read(&spec, &transformers(arch)).unwrap(), Meaning { cuts: theirs, ..all }, "{arch:?}");
        }
    }

    #[test]
    fn names_styles_and_whole_branches_are_as_the_plan_says() {
        let prefixed = built_in(Arch::Llama).into_iter().map(|(k, v)| (format!("model.{k}"), v)).collect();
        assert_eq!(read(&spec(Arch::Llama), &prefixed).unwrap().cuts, Cuts::ALL);
        let mut plan = built_in(Arch::Llama);
        ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].iter().for_each(|m| drop(plan.remove(&in_layers(m))));
        assert_eq!(read(&spec(Arch::Llama), &plan).unwrap().cuts, Cuts { mlp: false, ..Cuts::ALL });
        let norms = ["norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm"];
        let sequence = with(&norms.map(|norm| (norm, "sequence_parallel"))).unwrap();
        assert!(sequence.sequence_parallel && !with(&[]).unwrap().sequence_parallel);
        // Older plans of Gemma 3 omit the head norms.
        assert!(
            with(&["self_attn.q_norm", "self_attn.k_norm"].map(|m| (m, REPLICATE)).map(|_| ("lm_head", "colwise_rep")))
                .is_ok()
        );
    }

    #[test]
    fn what_would_be_wrong_is_refused_with_the_reason() {
        for (entries, reason) in [
            (
                vec![("layers.*.self_attn.k_proj", REPLICATE)],
                "o_proj is \"rowwise\", but layers.*.self_attn.k_proj before it",
            ),
            (vec![("layers.*.mlp.down_proj", REPLICATE)], "down_proj after it is not rowwise"),
            (vec![("layers.*.mlp.up_proj", "rowwise")], "its branch needs colwise"),
            (vec![("layers.*.self_attn.q_proj", "colwise_rep")], "only the head may gather"),
            (vec![("layers.*.input_layernorm", "sequence_parallel")], "norm is not"),
            (vec![("norm", HEAD_NORM)], "residual norms"),
            (vec![("embed_tokens", "embedding_colwise")], "sharded by vocabulary"),
            (vec![("lm_head", "rowwise")], "sharded by vocabulary"),
            (vec![("layers.*.mlp.experts.gate_up_proj", "packed_colwise")], "no such module"),
            (vec![("layers.*.mlp.up_proj", "packed_colwise")], "no module of the supported families"),
            (vec![("layers.*.mlp.up_proj", "columnwise")], "the known styles are colwise"),
        ] {
            let refused = with(&entries).unwrap_err().to_string();
            assert!(refused.contains(reason), "{entries:?}: {refused}");
        }
    }
}

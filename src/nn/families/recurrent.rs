//! Names and shapes of mixers other than attention: gated delta nets, Mamba 2 and short convolutions. Never computes.
use crate::device::ops::{ConvKind, DeltaShape, RmsNormShape};
use crate::nn::conv::ConvBranch;
use crate::nn::delta::{DeltaBranch, DeltaInputs, OutNorm};
use crate::nn::families::names::{BIAS, Names, WEIGHT};
use crate::nn::layout::{Init, Tp};
use crate::nn::linear::Linear;
use crate::nn::norm::Norm;
use crate::nn::recurrence::{DeltaForm, DeltaNet, Mamba};
use crate::nn::split::Slice;

/// A gated delta net, or with tp this rank's heads of it. `norm`: of its input.
pub(super) fn delta(names: &mut Names, net: &DeltaNet, norm: Norm) -> DeltaBranch {
    let (spec, split) = (names.spec, names.split);
    let over = split.part(split.cuts.attention);
    let (whole, shape) = (net.shape, over_heads(net.shape, over));
    let DeltaShape { value_heads, value_dim, .. } = whole;
    let inputs = match net.form {
        DeltaForm::Fused => DeltaInputs::Fused {
            qkvz: names.column("linear_attn.in_proj_qkvz", whole.row() + whole.values(), over, false),
            ba: names.column("linear_attn.in_proj_ba", 2 * value_heads, over, false),
        },
        DeltaForm::Mamba(form) => return mamba(names, net, norm, form),
        DeltaForm::Joined => {
            let qkv = names.parts("linear_attn.in_proj_qkv", [whole.keys(), whole.keys(), whole.values()], over);
            DeltaInputs::Apart {
                qkv: vec![Linear::new(qkv, shape.row(), spec.dim)],
                z: names.column("linear_attn.in_proj_z", whole.values(), over, false),
                b: Some(names.column("linear_attn.in_proj_b", value_heads, over, false)),
                a: names.column("linear_attn.in_proj_a", value_heads, over, false),
            }
        }
        DeltaForm::Apart => {
            let columns = [0, shape.keys(), 2 * shape.keys()];
            let parts = [("q_proj", whole.keys()), ("k_proj", whole.keys()), ("v_proj", whole.values())];
            let part = |((name, width), column)| {
                names.column(&format!("linear_attn.{name}"), width, over, false).within(shape.row(), column)
            };
            DeltaInputs::Apart {
                qkv: parts.into_iter().zip(columns).map(part).collect(),
                z: names.column("linear_attn.g_proj", whole.values(), over, false),
                b: Some(names.column("linear_attn.b_proj", value_heads, over, false)),
                a: names.column("linear_attn.a_proj", value_heads, over, false),
            }
        }
    };
    let conv = match net.form {
        DeltaForm::Apart => {
            let parts = [("q_conv1d", whole.keys()), ("k_conv1d", whole.keys()), ("v_conv1d", whole.values())];
            let part = |(name, channels)| {
                let name = format!("linear_attn.{name}");
                names.cut(&name, WEIGHT, &[channels, 1, net.taps], 0, over, Init::NORMAL)
            };
            parts.map(part).to_vec()
        }
        _ => {
            let (name, rows) = (("linear_attn.conv1d", WEIGHT), [whole.keys(), whole.keys(), whole.values()]);
            vec![names.rows_of_parts(name, rows, &[1, net.taps], over, Init::NORMAL)]
        }
    };
    let mut of_heads = |name: &str, init| numbers(names, &format!("linear_attn.{name}"), value_heads, over, init);
    let (dt_bias, a_log) = (of_heads("dt_bias", Init::ONES), of_heads("A_log", Init::ZEROS));
    // The class of OLMo hybrid says so.
    let (head_norm, out, eps) = match net.form {
        DeltaForm::Apart => ("linear_attn.o_norm", "linear_attn.o_proj", 1e-5),
        _ => ("linear_attn.norm", "linear_attn.out_proj", spec.norm_eps),
    };
    DeltaBranch {
        norm,
        inputs,
        conv,
        conv_bias: None,
        factors: [1.0; 5],
        own_filters: net.has_own_filters(),
        taps: net.taps,
        a_log,
        dt_bias,
        skip: None,
        shape,
        out_norm: Some(OutNorm {
            weight: names.push(head_norm, WEIGHT, &[value_dim], names.head_norm(), Init::ONES),
            shape: RmsNormShape { eps, offset: 0.0 },
            groups: None,
        }),
        out: names.row(out, whole.values(), over, false),
        cut: split.cuts.attention,
        beside: false,
    }
}

/// Mamba 2, or with tp this rank's heads of it: one matrix gives z, values, keys, queries and dt.
fn mamba(names: &mut Names, net: &DeltaNet, norm: Norm, form: Mamba) -> DeltaBranch {
    let (spec, split) = (names.spec, names.split);
    let (over, modules) = (split.part(split.cuts.attention), &spec.arch.family().modules);
    let (whole, shape) = (net.shape, over_heads(net.shape, over));
    let name = |of: &str| format!("{}.{of}", modules.mamba);
    let rows = [whole.values(), whole.values(), whole.keys(), whole.keys(), whole.value_heads];
    let weight = names.parts(&name("in_proj"), rows, over);
    let part = |outputs, first| Linear::new(weight, outputs, spec.dim).from(first);
    let inputs = DeltaInputs::Apart {
        qkv: vec![part(shape.row(), shape.values())],
        z: part(shape.values(), 0),
        a: part(shape.value_heads, shape.values() + shape.row()),
        b: None,
    };
    let (conv, channels) = (name("conv1d"), [whole.values(), whole.keys(), whole.keys()]);
    DeltaBranch {
        norm,
        inputs,
        conv: vec![names.rows_of_parts((&conv, WEIGHT), channels, &[1, net.taps], over, Init::NORMAL)],
        conv_bias: form.conv_bias.then(|| names.rows_of_parts((&conv, BIAS), channels, &[], over, Init::ZEROS)),
        factors: form.factors,
        own_filters: net.has_own_filters(),
        taps: net.taps,
        a_log: numbers(names, &name("A_log"), whole.value_heads, over, Init::ZEROS),
        dt_bias: numbers(names, &name("dt_bias"), whole.value_heads, over, Init::ONES),
        skip: Some(numbers(names, &name("D"), whole.value_heads, over, Init::ONES)),
        shape,
        out_norm: form.normed.then(|| OutNorm {
            weight: names.cut(&name("norm"), WEIGHT, &[whole.values()], 0, over, Init::ONES),
            shape: RmsNormShape { eps: spec.norm_eps, offset: 0.0 },
            groups: Some(shape.key_heads),
        }),
        out: {
            let out = names.row(&name("out_proj"), whole.values(), over, false);
            names.layout.segments[out.weight].adaptable = spec.arch.adapts_mamba_out();
            out
        },
        cut: split.cuts.attention,
        beside: spec.side_by_side,
    }
}

/// A number per value head.
fn numbers(names: &mut Names, name: &str, heads: usize, over: Slice, init: Init) -> usize {
    let tp = if over.of > 1 { Tp::Cut { dim: 0, over, whole: heads } } else { Tp::Same };
    names.layout.push_part(format!("{}{name}", names.prefix), &[over.share(heads).len()], tp, false, init)
}

/// A gated short convolution, or with tp this rank's channels of it.
pub(super) fn conv(names: &mut Names, channels: usize, taps: usize) -> ConvBranch {
    let (spec, split) = (names.spec, names.split);
    let over = split.part(split.cuts.attention);
    ConvBranch {
        norm: names.norm(spec.arch.family().modules.attention_norms[0], spec.dim),
        inputs: {
            let own = ConvKind::Gated.parts() * over.share(channels).len();
            Linear::new(names.parts("conv.in_proj", [channels; 3], over), own, spec.dim)
        },
        conv: names.cut("conv.conv", WEIGHT, &[channels, 1, taps], 0, over, Init::NORMAL),
        taps,
        out: names.row("conv.out_proj", channels, over, false),
        post: spec.post_norms.then(|| names.norm(spec.arch.family().modules.attention_norms[1], spec.dim)),
        cut: split.cuts.attention,
    }
}

/// A rank's share of the heads.
fn over_heads(whole: DeltaShape, over: Slice) -> DeltaShape {
    DeltaShape { key_heads: whole.key_heads / over.of, value_heads: whole.value_heads / over.of, ..whole }
}

//! Llama and its descendants as data, with the tensor names of transformers' `...ForCausalLM`, so checkpoints need no
//! conversion. The [`Spec`] determines which modules exist, never the family's name; the [`Split`] determines this
//! rank's shards.
use crate::device::ops::{AttentionShape, ConvKind, DeltaShape, QkNormRopeShape, RmsNormShape, RopeShape, RouteShape};
use crate::nn::attention::{AttentionBranch, HeadTransform, RowBias, RowPart};
use crate::nn::block::{DecoderBlock, FeedForward, Mixer};
use crate::nn::cache::cached_before;
use crate::nn::context::TurnTable;
use crate::nn::conv::ConvBranch;
use crate::nn::delta::{DeltaBranch, DeltaInputs};
use crate::nn::expert_layer::{ClampedExperts, ExpertLayer};
use crate::nn::experts::{SharedExpert, SparseBranch};
use crate::nn::families::table::SparseNames;
use crate::nn::grouped::GroupedLinear;
use crate::nn::latent::LatentProjections;
use crate::nn::layout::{Init, Layout, Tp, half_name, slice_name};
use crate::nn::linear::Linear;
use crate::nn::mlp::MlpBranch;
use crate::nn::norm::Norm;
use crate::nn::per_layer::{PerLayerBranch, PerLayerRoot};
use crate::nn::root::{Root, VocabRows};
use crate::nn::shared_kv::{KvSharing, Sight};
use crate::nn::spec::{DeltaForm, DeltaNet, Experts, Latent, Recurrence, Spec};
use crate::nn::split::{Slice, Split};
use crate::nn::store::Stride;
use crate::nn::value_norm::ValueNorm;

pub fn root(spec: &Spec, split: &Split) -> (Layout, Root) {
    let &Spec { vocab, dim, .. } = spec;
    let mut names = Names { prefix: "model.".into(), layout: Layout::default(), spec, split };
    let table = |names: &mut Names, name: &str, over: Slice| VocabRows {
        weight: names.cut(name, WEIGHT, &[vocab, dim], 0, over, Init::NORMAL),
        over,
    };
    let tokens = table(&mut names, "embed_tokens", split.part(split.cuts.embedding));
    let per_layer = (spec.layer_inputs > 0).then(|| {
        let (width, words) = (spec.layer_inputs, spec.layer_words);
        let all = spec.layers * width;
        let table = names.push("embed_tokens_per_layer", WEIGHT, &[words, all], Tp::Same, Init::NORMAL);
        let projection = names.push("per_layer_model_projection", WEIGHT, &[all, dim], Tp::Same, Init::NORMAL);
        PerLayerRoot {
            table,
            words,
            projection: Linear::new(projection, all, dim),
            norm: names.scale("per_layer_projection_norm", width, Tp::Same),
            shape: names.rms(),
            width,
            projection_scale: (dim as f32).sqrt().recip(),
        }
    });
    let norm = names.norm(spec.arch.family().modules.last_norm, dim);
    names.prefix.clear();
    let score_tp = if split.sequence() { Tp::Summed } else { Tp::Same };
    let words = match (spec.score, spec.tied) {
        (true, _) => VocabRows::all(names.push("score", WEIGHT, &[1, dim], score_tp, Init::NORMAL)),
        (_, true) => tokens,
        _ => table(&mut names, "lm_head", split.part(split.cuts.head)),
    };
    let embed_scale = if spec.scaled_embedding { (dim as f64).sqrt() as f32 } else { spec.embed_multiplier };
    let head = Linear::new(words.weight, words.range(spec.outputs()).len(), dim);
    let &Spec { score, logit_scale, logit_cap, .. } = spec;
    let root = Root {
        tokens,
        per_layer,
        positions: None,
        embed_scale,
        norm,
        head,
        words,
        vocab,
        score,
        logit_scale,
        logit_cap,
    };
    (names.layout, root)
}

pub fn block(model: &Spec, split: &Split, i: usize) -> (Layout, DecoderBlock) {
    let spec = &model.of_block(i);
    let &Spec { dim, head_dim, .. } = spec;
    let local = split.local(spec);
    let (row, heads, kv_heads) = (local.qkv(), local.heads, local.kv_heads);
    let by_heads = split.part(split.cuts.attention);
    let mut names = Names { prefix: format!("model.layers.{i}."), layout: Layout::default(), spec, split };
    if let Some(mixer) = spec.recurrence_of(i) {
        let mixer = match mixer {
            Recurrence::Delta(net) => Mixer::Delta(delta(&mut names, net)),
            &Recurrence::Conv { channels, taps } => Mixer::Conv(conv(&mut names, channels, taps)),
        };
        let mlp = match spec.experts_of(i) {
            Some(experts) => FeedForward::Sparse(sparse(&mut names, experts, i)),
            None => FeedForward::Dense(dense(&mut names, Norm::Absent, [true, false])),
        };
        return (names.layout, DecoderBlock { mixer, mlp, per_layer: None, scalar: None, parallel: false });
    }

    let sight = if spec.window_of(i) == 0 { Sight::All } else { Sight::Window };
    let sharing = match spec.kv_source(i) {
        Some(_) => KvSharing::Takes(sight),
        None if spec.gives_kv(i) => KvSharing::Gives(sight),
        None => KvSharing::Own,
    };
    let takes = sharing == KvSharing::Takes(sight);
    let modules = &spec.arch.family().modules;
    let norm = names.branch_norm(spec.pre_norms, modules.attention_norms[0]);
    let (mut qkv, mut biases, mut column) = (Vec::new(), Vec::new(), 0);
    // Ranks that share a key/value head hold all of them and compute with one.
    let shared = split.shared_kv(spec);
    let q = (spec.heads, heads, None);
    let kv = (spec.kv_heads, kv_heads, shared);
    let latent = spec.latent.map(|latent| names.latent(latent, heads, by_heads));
    if spec.fused_qkv {
        let rows = [spec.heads, spec.kv_heads, spec.kv_heads].map(|heads| heads * head_dim);
        qkv.push(Linear::new(names.parts("self_attn.qkv_proj", rows, by_heads), row, dim));
    }
    let apart = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)];
    let without = match sharing {
        KvSharing::Takes(_) => 1,
        _ => 3 - usize::from(spec.values_are_keys(i)),
    };
    let (apart, row) = (apart.into_iter().take(without), if takes { heads * head_dim } else { row });
    for (name, (all, own, shared)) in apart.filter(|_| !spec.fused_qkv && latent.is_none()) {
        let (width, first) = (own * head_dim, shared.unwrap_or(0) * head_dim);
        if spec.output_gate && name == "self_attn.q_proj" {
            qkv.push(names.column(name, 2 * all * head_dim, by_heads, false));
            column += width;
            continue;
        }
        let mut segment = |suffix: &str, shape: &[usize], init| match shared {
            None => names.cut(name, suffix, shape, 0, by_heads, init),
            Some(_) => names.push(name, suffix, shape, Tp::Summed, init),
        };
        let weight = segment(WEIGHT, &[all * head_dim, dim], Init::NORMAL);
        if spec.qkv_bias {
            biases.push(RowPart { segment: segment(BIAS, &[all * head_dim], Init::ZEROS), held: first..first + width });
        }
        qkv.push(Linear::new(weight, width, dim).from(first).within(row, column));
        column += width;
    }
    let row = local.qkv();
    let (rotated, pairs) = (spec.rotary_dim(), spec.rotary_pairs);
    let rope = RopeShape { heads: heads + kv_heads, head_dim, rotated, pairs, row };
    let transform = if spec.qk_norm {
        let [q, k] = modules.head_norms;
        let wq = names.scale(q, head_dim, names.head_norm());
        let wk = if takes { wq } else { names.scale(k, head_dim, names.head_norm()) };
        let normed_keys = if takes { 0 } else { kv_heads };
        let shape = QkNormRopeShape { heads, kv_heads: normed_keys, head_dim, norm: names.rms() };
        let from = heads + if spec.values_are_keys(i) { 0 } else { kv_heads };
        let values = (spec.value_norm && !takes)
            .then(|| ValueNorm { norm: RmsNormShape { offset: 1.0, ..names.rms() }, from: from * head_dim });
        let before = (spec.norm_after_rope && spec.is_rotated(i)).then_some(rope);
        let in_part = spec.rotated_in_part() && spec.is_rotated(i);
        let after = (in_part && before.is_none()).then_some(rope);
        HeadTransform::NormRope { shape, wq, wk, before, after, values }
    } else if spec.row_norm {
        let widths = [heads * head_dim, kv_heads * head_dim];
        let [q, k] = modules.head_norms;
        let (wq, wk) = (names.scale(q, widths[0], Tp::Same), names.scale(k, widths[1], Tp::Same));
        HeadTransform::RowNormRope { rope: spec.is_rotated(i).then_some(rope), norm: names.rms(), wq, wk, widths }
    } else if spec.is_rotated(i) {
        HeadTransform::Rope(rope)
    } else {
        HeadTransform::None
    };
    let turns = match spec.is_rotated(i) {
        true if spec.uses_local_rope(i) => TurnTable::Local,
        true => TurnTable::Usual,
        false => TurnTable::None,
    };
    let scale = spec.score_factor();
    let (window, softcap) = (spec.window_of(i), spec.score_cap);
    let attention = AttentionBranch {
        norm,
        qkv,
        bias: (spec.qkv_bias && spec.latent.is_none()).then_some(RowBias(biases)),
        gated: spec.output_gate,
        transform,
        cut: split.cuts.attention,
        turns,
        growth: spec.query_growth.map(|_| RopeShape { heads, ..rope }),
        parallel: spec.parallel,
        shape: AttentionShape { heads, kv_heads, head_dim, scale, window, softcap },
        sharing,
        cached_before: cached_before(&split.local(model), i),
        latent,
        sinks: spec.sinks.then(|| {
            let (shape, tp) = (
                [heads],
                if by_heads.of > 1 { Tp::Cut { dim: 0, over: by_heads, whole: spec.heads } } else { Tp::Same },
            );
            names.layout.push_part(format!("{}self_attn.sinks", names.prefix), &shape, tp, false, Init::NORMAL)
        }),
        out: names.row(
            modules.attention_out,
            spec.heads * spec.latent.map_or(head_dim, |latent| latent.value),
            by_heads,
            spec.out_bias,
        ),
        post: spec.post_norms.then(|| names.norm(modules.attention_norms[1], dim)),
    };
    if let Some(experts) = spec.experts_of(i) {
        let mlp = FeedForward::Sparse(sparse(&mut names, experts, i));
        let mixer = Mixer::Attention(attention);
        return (names.layout, DecoderBlock { mixer, mlp, per_layer: None, scalar: None, parallel: false });
    }
    let mlp = FeedForward::Dense(dense(&mut names, attention.norm, [spec.pre_norms, spec.post_norms]));
    let per_layer = (spec.layer_inputs > 0).then(|| {
        let width = spec.layer_inputs;
        let gate = names.push("per_layer_input_gate", WEIGHT, &[width, dim], Tp::Same, Init::NORMAL);
        let out = names.push("per_layer_projection", WEIGHT, &[dim, width], Tp::Same, Init::residual(spec.layers));
        PerLayerBranch {
            gate: Linear::new(gate, width, dim),
            out: Linear::new(out, dim, width),
            post: names.norm("post_per_layer_input_norm", dim),
            first: i * width,
        }
    });
    let scalar = spec.layer_scalar.then(|| {
        // A buffer of transformers.
        let name = format!("{}layer_scalar", names.prefix);
        let segment = names.layout.push_part(name, &[1], Tp::Same, false, Init::ONES);
        names.layout.segments[segment].trainable = false;
        segment
    });
    (names.layout, DecoderBlock { mixer: Mixer::Attention(attention), mlp, per_layer, scalar, parallel: spec.parallel })
}

/// The dense feed-forward branch, with norms of its input and output if it has them; `first` is the norm of the first
/// branch, which parallel branches share.
fn dense(names: &mut Names, first: Norm, [pre, post]: [bool; 2]) -> MlpBranch {
    let (spec, split) = (names.spec, names.split);
    let &Spec { dim, ff, .. } = spec;
    let (modules, by_columns) = (&spec.arch.family().modules, split.part(split.cuts.mlp));
    let [up, down] = modules.mlp;
    let norm = match spec.parallel {
        true => first,
        false => names.branch_norm(pre, modules.mlp_norms[0]),
    };
    let (gate, up) = match spec.fused_gate_up {
        true => {
            let (gate, up) = names.gate_and_up(modules.gate_up, ff, by_columns);
            (Some(gate), up)
        }
        false => (
            spec.gated().then(|| names.column(modules.gate, ff, by_columns, spec.mlp_bias)),
            names.column(up, ff, by_columns, spec.mlp_bias),
        ),
    };
    MlpBranch {
        norm,
        cut: split.cuts.mlp,
        activation: spec.activation,
        gate,
        up,
        down: names.row(down, ff, by_columns, spec.mlp_bias),
        post: post.then(|| names.norm(modules.mlp_norms[1], dim)),
    }
}

/// A gated delta net, or with tp this rank's heads of it.
fn delta(names: &mut Names, net: &DeltaNet) -> DeltaBranch {
    let (spec, split) = (names.spec, names.split);
    let over = split.part(split.cuts.attention);
    let (whole, shape) = (net.shape, over_heads(net.shape, over));
    let DeltaShape { value_heads, value_dim, .. } = whole;
    let norm = names.norm(spec.arch.family().modules.attention_norms[0], spec.dim);
    let inputs = match net.form {
        DeltaForm::Fused => DeltaInputs::Fused {
            qkvz: names.column("linear_attn.in_proj_qkvz", whole.row() + whole.values(), over, false),
            ba: names.column("linear_attn.in_proj_ba", 2 * value_heads, over, false),
        },
        DeltaForm::Joined => {
            let qkv = names.parts("linear_attn.in_proj_qkv", [whole.keys(), whole.keys(), whole.values()], over);
            DeltaInputs::Apart {
                qkv: vec![Linear::new(qkv, shape.row(), spec.dim)],
                z: names.column("linear_attn.in_proj_z", whole.values(), over, false),
                b: names.column("linear_attn.in_proj_b", value_heads, over, false),
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
                b: names.column("linear_attn.b_proj", value_heads, over, false),
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
            let channels = Tp::Parts { over, rows: [whole.keys(), whole.keys(), whole.values()] };
            let channels = if over.of > 1 { channels } else { Tp::Same };
            vec![names.push("linear_attn.conv1d", WEIGHT, &[shape.row(), 1, net.taps], channels, Init::NORMAL)]
        }
    };
    let heads = if over.of > 1 { Tp::Cut { dim: 0, over, whole: value_heads } } else { Tp::Same };
    let mut of_heads = |name: &str, init| {
        let name = format!("{}linear_attn.{name}", names.prefix);
        names.layout.push_part(name, &[shape.value_heads], heads, false, init)
    };
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
        taps: net.taps,
        a_log,
        dt_bias,
        shape,
        head_norm: names.push(head_norm, WEIGHT, &[value_dim], names.head_norm(), Init::ONES),
        head_norm_shape: RmsNormShape { eps, offset: 0.0 },
        out: names.row(out, whole.values(), over, false),
        cut: split.cuts.attention,
    }
}

/// A gated short convolution, or with tp this rank's channels of it.
fn conv(names: &mut Names, channels: usize, taps: usize) -> ConvBranch {
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
        cut: split.cuts.attention,
    }
}

/// A rank's share of the heads.
fn over_heads(whole: DeltaShape, over: Slice) -> DeltaShape {
    DeltaShape { key_heads: whole.key_heads / over.of, value_heads: whole.value_heads / over.of, ..whole }
}

/// The experts of sparse block `i`, or with tp this rank's columns of each. The tensors of an expert follow each other,
/// so those of a kind are at equal distances. Every rank of ep lists all experts, and holds its share.
pub fn experts(spec: &Spec, split: &Split, i: usize) -> Layout {
    let SparseNames { module, expert: kinds, stacked, .. } = &spec.arch.family().modules.sparse;
    let (dim, down, columns) = (spec.dim, Init::residual(spec.layers), split.part(split.cuts.mlp));
    let (count, ff) = spec.experts.as_ref().map_or((0, 0), |experts| (experts.count, experts.ff));
    let layout = Layout { experts: true, ..Layout::default() };
    let mut names = Names { prefix: format!("model.layers.{i}.{module}.experts."), layout, spec, split };
    let clamped = spec.experts.as_ref().is_some_and(|experts| experts.clamp.is_some());
    let ranks = (0..split.ep.of).flat_map(|ep| Slice { index: ep, ..split.ep }.share(count).map(move |_| ep));
    for (e, ep) in ranks.enumerate() {
        let first = names.layout.segments.len();
        if clamped {
            names.clamped(e, ff, columns);
        }
        for (k, kind) in kinds.iter().enumerate().filter(|_| !clamped) {
            let (shape, cut, init) = if k == 2 { ([dim, ff], 1, down) } else { ([ff, dim], 0, Init::NORMAL) };
            match stacked {
                None => names.cut(&format!("{e}.{kind}"), WEIGHT, &shape, cut, columns, init),
                Some(whole) => names.stacked(*whole, (i, e, k), shape, cut, columns, init),
            };
        }
        if split.ep.of > 1 {
            names.layout.give(first, ep, ep == split.ep.index);
        }
    }
    names.layout
}

fn sparse(names: &mut Names, experts: &Experts, i: usize) -> SparseBranch {
    let Spec { arch, dim, .. } = *names.spec;
    let &SparseNames { module, router, correction, shared, shared_fused, shared_gate, .. } =
        &arch.family().modules.sparse;
    let &Experts { count, top_k, ff, shared_ff, normalize, .. } = experts;
    // What the gradient of a router follows from are sums over columns, so those of ranks that share them are summed.
    let columns = names.split.part(names.split.cuts.mlp);
    let summed = if columns.of > 1 { Tp::Summed } else { Tp::Same };
    let norm = names.norm(arch.family().modules.mlp_norms[0], dim);
    let router_name = format!("{module}.{router}");
    let router = names.push(&router_name, WEIGHT, &[count, dim], summed, Init::NORMAL);
    let router_bias = experts.clamp.map(|_| names.push(&router_name, BIAS, &[count], summed, Init::ZEROS));
    let correction = experts.rule.is_some_and(|rule| rule.biased).then(|| {
        // A buffer of transformers: it balances experts while a model is pretrained, by a rule of its own.
        let (name, dimensions) = (format!("{}{module}.{}", names.prefix, correction.0), correction.1);
        let shape: &[usize] = if dimensions == 1 { &[count] } else { &[1, count] };
        let segment = names.layout.push_part(name, shape, Tp::Same, false, Init::ZEROS);
        names.layout.segments[segment].trainable = false;
        segment
    });
    let rule = experts.rule.map(|rule| (rule, correction));
    let held = names.split.ep.share(count);
    let step = if experts.clamp.is_some() { CLAMPED_TENSORS } else { 3 };
    let stride = |k| Stride { first: step * held.start + k, step, count: held.len() };
    let width = columns.share(ff).len();
    let (gate, up, down, clamped) = match experts.clamp {
        Some(clamp) => (
            GroupedLinear::new(stride(0), 2 * width, dim).transposed(),
            None,
            GroupedLinear::new(stride(2), dim, width).transposed(),
            Some(ClampedExperts { clamp, bias: stride(1), down_bias: stride(3), is_first: columns.index == 0 }),
        ),
        None => {
            let [gate, up] = [0, 1].map(|k| GroupedLinear::new(stride(k), width, dim));
            (gate, Some(up), GroupedLinear::new(stride(2), dim, width), None)
        }
    };
    let shared = (shared_ff > 0).then(|| {
        let module = |name: &str| format!("{shared}.{name}");
        let (gate, up, down) = match shared_fused {
            None => {
                let [gate, up] =
                    ["gate_proj", "up_proj"].map(|kind| names.column(&module(kind), shared_ff, columns, false));
                (gate, up, "down_proj")
            }
            Some([both, down]) => {
                let (gate, up) = names.gate_and_up(&module(both), shared_ff, columns);
                (gate, up, down)
            }
        };
        let down = names.row(&module(down), shared_ff, columns, false);
        SharedExpert {
            gate,
            up,
            down,
            router: shared_gate.map(|name| names.push(name, WEIGHT, &[1, dim], summed, Init::NORMAL)),
        }
    });
    let index = (0..i).filter(|&i| names.spec.experts_of(i).is_some()).count();
    let shape = RouteShape { experts: count, top_k, normalize };
    let layer = names.spec.experts_layer(index);
    let experts = ExpertLayer { layer, index, top_k, gate, up, down, clamped, width: dim };
    SparseBranch { norm, cut: names.split.cuts.mlp, shape, router, router_bias, rule, experts, width: dim, shared }
}

/// Tensors of an expert whose gate and up are one.
const CLAMPED_TENSORS: usize = 4;
const WEIGHT: &str = "weight";
const BIAS: &str = "bias";

/// Builds a layout from names under `prefix`, of whole tensors or this rank's shards.
struct Names<'a> {
    prefix: String,
    layout: Layout,
    spec: &'a Spec,
    split: &'a Split,
}

impl Names<'_> {
    fn push(&mut self, name: &str, suffix: &str, shape: &[usize], tp: Tp, init: Init) -> usize {
        self.layout.push_part(format!("{}{name}.{suffix}", self.prefix), shape, tp, shape.len() > 1, init)
    }
    /// This rank's shard, along `dim`, of a tensor of `shape`.
    fn cut(&mut self, name: &str, suffix: &str, shape: &[usize], dim: usize, over: Slice, init: Init) -> usize {
        let (mut part, whole) = (shape.to_vec(), shape[dim]);
        part[dim] = over.share(whole).len();
        let tp = if over.of > 1 { Tp::Cut { dim, over, whole } } else { Tp::Same };
        self.push(name, suffix, &part, tp, init)
    }
    /// The projections of latent attention. Each rank of tp has the latents, and what follows for its `heads`.
    fn latent(&mut self, latent: Latent, heads: usize, by_heads: Slice) -> LatentProjections {
        let &Spec { dim, heads: all, head_dim, qkv_bias, .. } = self.spec;
        let Latent { q_rank, kv_rank, nope, rope, value } = latent;
        let replicated = if by_heads.of > 1 { Tp::Summed } else { Tp::Same };
        let to_latent = |names: &mut Self, name: &str, width: usize| {
            let linear = Linear::new(names.push(name, WEIGHT, &[width, dim], replicated, Init::NORMAL), width, dim);
            if qkv_bias { linear.bias(names.push(name, BIAS, &[width], replicated, Init::ZEROS)) } else { linear }
        };
        let of_heads = |names: &mut Self, name: &str, each: usize, inputs: usize| {
            let weight = names.cut(name, WEIGHT, &[all * each, inputs], 0, by_heads, Init::NORMAL);
            Linear::new(weight, heads * each, inputs)
        };
        let (q_latent, q) = if q_rank > 0 {
            let linear = to_latent(self, "self_attn.q_a_proj", q_rank);
            let norm = self.scale("self_attn.q_a_layernorm", q_rank, replicated);
            (Some((linear, norm)), of_heads(self, "self_attn.q_b_proj", nope + rope, q_rank))
        } else {
            (None, of_heads(self, "self_attn.q_proj", nope + rope, dim))
        };
        let kv_latent = to_latent(self, "self_attn.kv_a_proj_with_mqa", kv_rank + rope);
        let kv_norm = self.scale("self_attn.kv_a_layernorm", kv_rank, replicated);
        let kv = of_heads(self, "self_attn.kv_b_proj", nope + value, kv_rank);
        LatentProjections { shape: latent, heads, head_dim, q_latent, q, kv_latent, kv_norm, kv }
    }
    /// The tensors of expert `e` of gpt-oss: in files, those of a kind are one tensor. A rank's columns of the first
    /// two are pairs of a gate and an up.
    fn clamped(&mut self, e: usize, ff: usize, over: Slice) {
        let (dim, down) = (self.spec.dim, Init::residual(self.spec.layers));
        let kinds = [
            ("gate_up_proj", vec![dim, 2 * ff], Some(1), Init::NORMAL),
            ("gate_up_proj_bias", vec![2 * ff], Some(0), Init::ZEROS),
            ("down_proj", vec![ff, dim], Some(0), down),
            ("down_proj_bias", vec![dim], None, Init::ZEROS),
        ];
        for (kind, mut shape, cut, init) in kinds {
            let tp = match cut {
                _ if over.of == 1 => Tp::Same,
                None => Tp::Summed,
                Some(dim) => {
                    let whole = shape[dim];
                    shape[dim] = over.share(whole).len();
                    Tp::Cut { dim, over, whole }
                }
            };
            let name = format!("{}{}", self.prefix, slice_name(kind, e));
            self.layout.push_part(name, &shape, tp, shape.len() > 1, init);
        }
    }
    /// A matrix of expert `e` of block `i`, which files have in one tensor for the block: its gate (`k` is 0) above its
    /// up (1), or its down (2).
    fn stacked(
        &mut self,
        [gate_up, down]: [&str; 2],
        (i, e, k): (usize, usize, usize),
        mut shape: [usize; 2],
        cut: usize,
        over: Slice,
        init: Init,
    ) -> usize {
        let block = format!("model.layers.{i}.");
        let name = match k {
            2 => slice_name(&format!("{block}{down}"), e),
            half => half_name(&format!("{block}{gate_up}"), e, half),
        };
        let whole = shape[cut];
        shape[cut] = over.share(whole).len();
        let tp = if over.of > 1 { Tp::Cut { dim: cut, over, whole } } else { Tp::Same };
        self.layout.push_part(name, &shape, tp, true, init)
    }
    /// Column-parallel gate and up, which are one tensor.
    fn gate_and_up(&mut self, name: &str, ff: usize, over: Slice) -> (Linear, Linear) {
        let (both, dim) = (self.parts(name, [ff, ff, 0], over), self.spec.dim);
        let own = over.share(ff).len();
        let half = || Linear::new(both, own, dim);
        (half(), half().from(own))
    }
    /// This rank's shards of matrices that are one tensor, one below the other.
    fn parts(&mut self, name: &str, rows: [usize; 3], over: Slice) -> usize {
        let own = rows.map(|n| over.share(n).len()).iter().sum();
        let tp = if over.of > 1 { Tp::Parts { over, rows } } else { Tp::Same };
        self.push(name, WEIGHT, &[own, self.spec.dim], tp, Init::NORMAL)
    }
    /// Column-parallel: from the model's width to a shard of `outputs`.
    fn column(&mut self, name: &str, outputs: usize, over: Slice, bias: bool) -> Linear {
        let (dim, own) = (self.spec.dim, over.share(outputs).len());
        let linear = Linear::new(self.cut(name, WEIGHT, &[outputs, dim], 0, over, Init::NORMAL), own, dim);
        if bias { linear.bias(self.cut(name, BIAS, &[outputs], 0, over, Init::ZEROS)) } else { linear }
    }
    /// Row-parallel: from a shard of `inputs` to the model's width. Outputs are summed; then the bias, held by every
    /// rank, is added.
    fn row(&mut self, name: &str, inputs: usize, over: Slice, bias: bool) -> Linear {
        let (dim, own, init) = (self.spec.dim, over.share(inputs).len(), Init::residual(self.spec.layers));
        let linear = Linear::new(self.cut(name, WEIGHT, &[dim, inputs], 1, over, init), dim, own);
        if bias { linear.bias(self.push(name, BIAS, &[dim], Tp::Same, Init::ZEROS)) } else { linear }
    }
    /// The weights of a norm, initialized to multiply by 1.
    fn scale(&mut self, name: &str, width: usize, tp: Tp) -> usize {
        self.push(name, WEIGHT, &[width], tp, if self.spec.norm_from_one { Init::ZEROS } else { Init::ONES })
    }
    fn rms(&self) -> RmsNormShape {
        RmsNormShape { eps: self.spec.norm_eps, offset: if self.spec.norm_from_one { 1.0 } else { 0.0 } }
    }
    /// How a residual norm's weight relates to tp: each rank normalizes its own rows, or all of them.
    fn residual_norm(&self) -> Tp {
        if self.split.sequence() { Tp::Summed } else { Tp::Same }
    }
    /// How a head norm's weight relates to tp: each rank normalizes its own heads.
    fn head_norm(&self) -> Tp {
        if self.split.part(self.split.cuts.attention).of > 1 { Tp::Summed } else { Tp::Same }
    }
    fn norm(&mut self, name: &str, width: usize) -> Norm {
        let (w, eps) = (self.scale(name, width, self.residual_norm()), self.spec.norm_eps);
        if !self.spec.layer_norm {
            return Norm::Rms { w, shape: self.rms() };
        }
        let tp = self.residual_norm();
        let b = self.spec.norm_bias.then(|| self.push(name, BIAS, &[width], tp, Init::ZEROS));
        Norm::Layer { w, b, eps }
    }
    /// The norm of a branch's input, if the family has it.
    fn branch_norm(&mut self, has: bool, name: &str) -> Norm {
        if has { self.norm(name, self.spec.dim) } else { Norm::Absent }
    }
}

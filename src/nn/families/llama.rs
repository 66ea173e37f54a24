//! Llama and its descendants as data, with the tensor names of transformers' `...ForCausalLM`, so checkpoints need no
//! conversion. The [`Spec`] determines which modules exist, never the family's name; the [`Split`] determines this
//! rank's shards.
use crate::device::ops::{AttentionShape, QkNormRopeShape, RmsNormShape, RopeShape, RouteShape};
use crate::nn::attention::{AttentionBranch, HeadTransform, QkvOrder, RowBias, RowPart};
use crate::nn::beside::Beside;
use crate::nn::block::{DecoderBlock, FeedForward, Mixer};
use crate::nn::cache::cached_before;
use crate::nn::context::TurnTable;
use crate::nn::expert_layer::{ClampedExperts, ExpertLayer};
use crate::nn::experts::{SharedExpert, SparseBranch};
use crate::nn::families::names::{BIAS, Names, WEIGHT};
use crate::nn::families::recurrent::{conv, delta};
use crate::nn::families::table::SparseNames;
use crate::nn::grouped::GroupedLinear;
use crate::nn::layout::{Init, Layout, Storage, Tp};
use crate::nn::linear::Linear;
use crate::nn::mlp::MlpBranch;
use crate::nn::norm::Norm;
use crate::nn::output_gate::OutputGate;
use crate::nn::per_layer::{PerLayerBranch, PerLayerRoot};
use crate::nn::recurrence::Recurrence;
use crate::nn::root::{LearnedPositions, Root, VocabRows};
use crate::nn::row_transform::RowTransform;
use crate::nn::shared_kv::{KvSharing, Sight};
use crate::nn::spec::{Activation, Branch, Experts, Spec};
use crate::nn::split::{Slice, Split};
use crate::nn::store::Stride;
use crate::nn::value_norm::ValueNorm;

pub fn root(spec: &Spec, split: &Split) -> (Layout, Root) {
    let &Spec { vocab, dim, .. } = spec;
    let modules = &spec.arch.family().modules;
    let mut names = Names { prefix: format!("{}.", modules.base), layout: Layout::default(), spec, split };
    let table = |names: &mut Names, name: &str, over: Slice| VocabRows {
        weight: names.cut(name, WEIGHT, &[vocab, dim], 0, over, Init::NORMAL),
        over,
    };
    let tokens = table(&mut names, modules.embedding, split.part(split.cuts.embedding));
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
    let positions = spec.rope.is_none().then(|| {
        let (rows, first, tp) = (spec.max_len, spec.first_position, names.residual_norm());
        let segment = names.push(modules.positions, WEIGHT, &[first + rows, dim], tp, Init::NORMAL);
        LearnedPositions { segment, rows, first }
    });
    let norm = names.norm(modules.last_norm, dim);
    names.prefix.clear();
    let score_tp = if split.sequence() { Tp::Summed } else { Tp::Same };
    let words = match (spec.score, spec.tied) {
        (true, _) => VocabRows::all(names.push("score", WEIGHT, &[1, dim], score_tp, Init::NORMAL)),
        (_, true) => tokens,
        _ => table(&mut names, "lm_head", split.part(split.cuts.head)),
    };
    let embed_scale = if spec.scaled_embedding { (dim as f64).sqrt() as f32 } else { spec.embed_multiplier };
    let mut head = Linear::new(words.weight, words.range(spec.outputs()).len(), dim);
    if spec.head_bias && !spec.score {
        head = head.bias(names.cut("lm_head", BIAS, &[vocab], 0, words.over, Init::ZEROS));
    }
    let &Spec { score, logit_scale, logit_cap, .. } = spec;
    let root = Root {
        tokens,
        per_layer,
        positions,
        embed_scale,
        embed_norm: spec.embed_norm.then_some(Norm::Bare { eps: spec.norm_eps, rms: true }),
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
    let modules = &spec.arch.family().modules;
    let prefix = format!("{}.{}.{i}.", modules.base, modules.layers);
    let mut names = Names { prefix, layout: Layout::default(), spec, split };
    if !spec.attends(i) {
        let mixer = match spec.recurrence_of(i) {
            Some(Recurrence::Delta(net)) => {
                let norm = names.norm(modules.attention_norms[0], dim);
                Mixer::Delta(delta(&mut names, net, norm))
            }
            Some(&Recurrence::Conv { channels, taps }) => Mixer::Conv(conv(&mut names, channels, taps)),
            None => Mixer::None,
        };
        // Norms after the branches of OLMo hybrid are those of blocks with attention only.
        let after = spec.post_norms && matches!(mixer, Mixer::Conv(_));
        let mlp = feed_forward(&mut names, i, Norm::Absent, [true, after]);
        let mlp_factor = spec.mlp_factor(i);
        return (names.layout, DecoderBlock { mixer, mlp, per_layer: None, scalar: None, parallel: false, mlp_factor });
    }

    let sight = if spec.window_of(i) == 0 { Sight::All } else { Sight::Window };
    let sharing = match spec.kv_source(i) {
        Some(_) => KvSharing::Takes(sight),
        None if spec.gives_kv(i) => KvSharing::Gives(sight),
        None => KvSharing::Own,
    };
    let takes = sharing == KvSharing::Takes(sight);
    let [norm, _] = spec.arch.family().input_norms(spec);
    let norm = names.branch_norm(spec.pre_norms, norm);
    let (mut qkv, mut biases, mut column) = (Vec::new(), Vec::new(), 0);
    // Ranks that share a key/value head hold all of them and compute with one.
    let shared = split.shared_kv(spec);
    let q = (spec.heads, heads, None);
    let kv = (spec.kv_heads, kv_heads, shared);
    let latent = spec.latent.map(|latent| names.latent(latent, heads, by_heads));
    let goes_by_heads = spec.qkv_by_heads && shared.is_none();
    if goes_by_heads {
        qkv.push(names.column(modules.qkv, spec.qkv(), by_heads, spec.qkv_bias));
    } else if let Some(kv) = shared.filter(|_| spec.qkv_by_heads) {
        // Every rank has all of the matrix, and computes its queries and the key/value head that they share.
        let weight = names.push(modules.qkv, WEIGHT, &[spec.qkv(), dim], Tp::Summed, Init::NORMAL);
        let bias = spec.qkv_bias.then(|| names.push(modules.qkv, BIAS, &[spec.qkv()], Tp::Summed, Init::ZEROS));
        let (group, before) = (spec.heads / spec.kv_heads, by_heads.index * heads);
        let parts = [(before + 2 * kv, heads), (kv * (group + 2) + group, 2)];
        for (first, width) in parts.map(|(first, of)| (first * head_dim, of * head_dim)) {
            qkv.push(Linear::new(weight, width, dim).from(first).within(row, column));
            biases.extend(bias.map(|segment| RowPart { segment, held: first..first + width }));
            column += width;
        }
    } else if spec.fused_qkv {
        let rows = [spec.heads, spec.kv_heads, spec.kv_heads].map(|heads| heads * head_dim);
        qkv.push(Linear::new(names.parts(modules.qkv, rows, by_heads), row, dim));
    }
    let apart = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
    let without = match sharing {
        KvSharing::Takes(_) => 1,
        _ => 3 - usize::from(spec.values_are_keys(i)),
    };
    let (apart, row) = (apart.into_iter().take(without), if takes { heads * head_dim } else { row });
    for (name, (all, own, shared)) in apart.filter(|_| !spec.fused_qkv && latent.is_none()) {
        let (width, first) = (own * head_dim, shared.unwrap_or(0) * head_dim);
        let (is_q, name) = (name == "q_proj", &format!("{}.{name}", modules.attention));
        if spec.output_gate && !spec.gate_apart && is_q {
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
    let gate = (spec.output_gate && spec.gate_apart).then(|| {
        let (name, outputs) = match spec.gate_by_heads {
            true => ("g_proj", spec.heads),
            false => ("gate_proj", spec.heads * head_dim),
        };
        names.column(&format!("{}.{name}", modules.attention), outputs, by_heads, false)
    });
    let row = local.qkv();
    let (rotated, pairs) = (spec.rotary_dim(), spec.rotary_pairs);
    let rope = RopeShape { heads: heads + kv_heads, head_dim, rotated, pairs, row };
    let transform = if spec.norms_heads(i) {
        let [q, k] = modules.head_norms;
        let weights = (!spec.has_bare_norms()).then(|| {
            let wq = names.scale(q, head_dim, names.head_norm());
            [wq, if takes { wq } else { names.scale(k, head_dim, names.head_norm()) }]
        });
        let normed_keys = if takes { 0 } else { kv_heads };
        let shape = QkNormRopeShape { heads, kv_heads: normed_keys, head_dim, norm: names.rms() };
        let from = heads + if spec.values_are_keys(i) { 0 } else { kv_heads };
        let values = (spec.value_norm && !takes)
            .then(|| ValueNorm { norm: RmsNormShape { offset: 1.0, ..names.rms() }, from: from * head_dim });
        let before = (spec.norm_after_rope && spec.is_rotated(i)).then_some(rope);
        let in_part = spec.rotated_in_part() && spec.is_rotated(i);
        let after = (in_part && before.is_none()).then_some(rope);
        HeadTransform::NormRope { shape, weights, before, after, values }
    } else if spec.transforms_rows() {
        let own = |all: usize, shared: Option<usize>| shared.map_or(by_heads.share(all), |one| one..one + 1);
        let norms = names.row_norms([(spec.heads, own(spec.heads, None)), (spec.kv_heads, own(spec.kv_heads, shared))]);
        HeadTransform::Rows(RowTransform { norms, clip: spec.qkv_clip, rope: spec.is_rotated(i).then_some(rope) })
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
    let beside = match spec.recurrence_of(i) {
        Some(Recurrence::Delta(net)) => Some(net),
        _ => None,
    };
    let (window, softcap) = (spec.window_of(i), spec.score_cap);
    let attention = AttentionBranch {
        norm,
        qkv,
        bias: (!biases.is_empty()).then_some(RowBias(biases)),
        order: match (spec.output_gate && !spec.gate_apart, goes_by_heads) {
            (true, _) => QkvOrder::Gated,
            (_, true) => QkvOrder::ByBlocks {
                blocks: spec.qkv_blocks.map_or(kv_heads, |blocks| blocks / by_heads.of),
                values_first: spec.qkv_blocks.is_some(),
            },
            _ => QkvOrder::Same,
        },
        output_gate: match spec.gate_by_heads {
            true => Some(OutputGate::Heads),
            false => spec.output_gate.then_some(OutputGate::Elements),
        },
        gate,
        transform,
        cut: split.cuts.attention,
        turns,
        growth: spec.grows(i).then_some(RopeShape { heads, ..rope }),
        parallel: spec.parallel || beside.is_some(),
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
    let (first, beside) = (attention.norm, beside.map(|net| delta(&mut names, net, attention.norm)));
    let mlp = feed_forward(&mut names, i, first, [spec.pre_norms, spec.post_norms]);
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
        names.layout.segments[segment].storage = Storage::Saved;
        segment
    });
    let mixer = match beside {
        Some(delta) => Mixer::Both(attention, delta),
        None => Mixer::Attention(attention),
    };
    let mlp_factor = spec.mlp_factor(i);
    (names.layout, DecoderBlock { mixer, mlp, per_layer, scalar, parallel: spec.parallel, mlp_factor })
}

/// The second branch of block `i`, if it has one; the others are those of [`dense`].
fn feed_forward(names: &mut Names, i: usize, first: Norm, norms: [bool; 2]) -> FeedForward {
    match names.spec.experts_of(i) {
        _ if !names.spec.has(i, Branch::FeedForward) => FeedForward::None,
        Some(experts) => FeedForward::Sparse(sparse(names, experts, first, i)),
        None => FeedForward::Dense(dense(names, first, norms)),
    }
}

/// The dense feed-forward branch, with norms of its input and output if it has them; `first` is the norm of the first
/// branch, which parallel branches share.
fn dense(names: &mut Names, first: Norm, [pre, post]: [bool; 2]) -> MlpBranch {
    let (spec, split) = (names.spec, names.split);
    let &Spec { dim, ff, .. } = spec;
    let (modules, by_columns) = (&spec.arch.family().modules, split.part(split.cuts.mlp));
    let [up, down] = modules.mlp;
    let norm = match spec.parallel && !spec.own_norms {
        true => first,
        false => names.branch_norm(pre, spec.arch.family().input_norms(spec)[1]),
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
        gate_factor: spec.block_factors.gate,
        up,
        down: names.row(down, ff, by_columns, spec.mlp_bias),
        post: post.then(|| names.norm(modules.mlp_norms[1], dim)),
        summed: false,
        curve: (spec.activation == Activation::Xielu).then(|| curve(names, by_columns)),
    }
}

/// The numbers of xIELU, of which transformers has the last two as buffers without dimensions. Initially, p and n are
/// 0.8.
fn curve(names: &mut Names, columns: Slice) -> [usize; 4] {
    let tp = if columns.of > 1 { Tp::Summed } else { Tp::Same };
    let initial = |alpha: f32| Init::Constant(alpha.exp_m1().ln());
    [
        ("alpha_p", &[1][..], true, initial(0.8)),
        ("alpha_n", &[1], true, initial(0.8 - XIELU_BETA)),
        ("beta", &[], false, Init::Constant(XIELU_BETA)),
        ("eps", &[], false, Init::Constant(-1e-6)),
    ]
    .map(|(name, shape, trainable, init)| {
        let name = format!("{}mlp.act_fn.{name}", names.prefix);
        let segment = names.layout.push_part(name, shape, if trainable { tp } else { Tp::Same }, false, init);
        names.layout.segments[segment].storage = if trainable { Storage::Trained } else { Storage::Saved };
        segment
    })
}
const XIELU_BETA: f32 = 0.5;

/// The dense branch next to experts. `summed`: how the gradients of a router's parameters relate to tp.
fn beside(names: &mut Names, count: usize, summed: Tp) -> Beside {
    let (dim, tp) = (names.spec.dim, names.residual_norm());
    let dense = dense(names, Norm::Absent, [true, false]);
    let post = Some(names.norm("post_feedforward_layernorm_1", dim));
    let vector = |names: &mut Names, name: &str, len: usize, tp: Tp| {
        names.layout.push_part(format!("{}router.{name}", names.prefix), &[len], tp, false, Init::ONES)
    };
    Beside {
        dense: MlpBranch { post, summed: true, ..dense },
        router_norm: Norm::Rms { w: vector(names, "scale", dim, tp), shape: names.rms() },
        logit_scale: (dim as f32).sqrt().recip(),
        factors: vector(names, "per_expert_scale", count, summed),
        posts: ["post_feedforward_layernorm_2", names.spec.arch.family().modules.mlp_norms[1]]
            .map(|name| names.norm(name, dim)),
    }
}

/// The experts of sparse block `i`, or with tp this rank's columns of each. The tensors of an expert follow each other,
/// so those of a kind are at equal distances. Every rank of ep lists all experts, and holds its share.
pub fn experts(spec: &Spec, split: &Split, i: usize) -> Layout {
    let &SparseNames { module, expert: kinds, stacked, transposed, .. } = &spec.arch.family().modules.sparse;
    let (dim, down, columns) = (spec.dim, Init::residual(spec.layers), split.part(split.cuts.mlp));
    let (count, ff) = spec.experts.as_ref().map_or((0, 0), |experts| (experts.count, experts.ff));
    let layout = Layout { experts: true, ..Layout::default() };
    let mut names = Names { prefix: format!("model.layers.{i}.{module}.experts."), layout, spec, split };
    let clamped = spec.experts.as_ref().is_some_and(|experts| experts.clamp.is_some());
    let own = |k: usize| !clamped && (k > 0 || spec.gated());
    let ranks = (0..split.ep.of).flat_map(|ep| Slice { index: ep, ..split.ep }.share(count).map(move |_| ep));
    for (e, ep) in ranks.enumerate() {
        let first = names.layout.segments.len();
        if clamped {
            names.clamped(e, ff, columns);
        }
        for (k, kind) in kinds.iter().enumerate().filter(|(k, _)| own(*k)) {
            let (mut shape, mut cut, init) = if k == 2 { ([dim, ff], 1, down) } else { ([ff, dim], 0, Init::NORMAL) };
            if transposed {
                shape.reverse();
                cut = 1 - cut;
            }
            match stacked {
                None => names.cut(&format!("{e}.{kind}"), WEIGHT, &shape, cut, columns, init),
                Some(whole) => names.stacked(whole, (i, e, k), shape, cut, columns, init),
            };
        }
        if split.ep.of > 1 {
            names.layout.give(first, ep, ep == split.ep.index);
        }
    }
    names.layout
}

/// The experts of block `i`; `first` as in [`dense`].
fn sparse(names: &mut Names, experts: &Experts, first: Norm, i: usize) -> SparseBranch {
    let Spec { arch, dim, .. } = *names.spec;
    let &SparseNames { module, router, correction, shared, shared_fused, shared_gate, transposed, .. } =
        &arch.family().modules.sparse;
    let &Experts { count, top_k, ff, shared_ff, normalize, .. } = experts;
    // What the gradient of a router follows from are sums over columns, so those of ranks that share them are summed.
    let columns = names.split.part(names.split.cuts.mlp);
    let summed = if columns.of > 1 { Tp::Summed } else { Tp::Same };
    let beside = experts.beside.then(|| beside(names, count, summed));
    let [pre, post] = arch.family().modules.mlp_norms;
    let norm = match beside {
        Some(_) => names.norm("pre_feedforward_layernorm_2", dim),
        None if names.spec.parallel => first,
        None => names.branch_norm(names.spec.pre_norms, pre),
    };
    let is_normed = names.spec.norms_experts() && beside.is_none();
    let post = is_normed.then(|| names.norm(post, dim));
    let router_name = format!("{module}.{router}");
    let router = names.push(&router_name, WEIGHT, &[count, dim], summed, Init::NORMAL);
    let router_bias = experts.clamp.map(|_| names.push(&router_name, BIAS, &[count], summed, Init::ZEROS));
    let correction = experts.rule.is_some_and(|rule| rule.biased).then(|| {
        // A buffer of transformers: it balances experts while a model is pretrained, by a rule of its own.
        let (name, dimensions) = (format!("{}{module}.{}", names.prefix, correction.0), correction.1);
        let shape: &[usize] = if dimensions == 1 { &[count] } else { &[1, count] };
        let segment = names.layout.push_part(name, shape, Tp::Same, false, Init::ZEROS);
        names.layout.segments[segment].storage = Storage::Saved;
        segment
    });
    let rule = experts.rule.map(|rule| (rule, correction));
    let held = names.split.ep.share(count);
    let gated = names.spec.gated();
    let step = if experts.clamp.is_some() { CLAMPED_TENSORS } else { 2 + usize::from(gated) };
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
            let linear = |k, outputs, inputs| {
                let linear = GroupedLinear::new(stride(k), outputs, inputs);
                if transposed { linear.transposed() } else { linear }
            };
            let [first, up] = [0, 1].map(|k| linear(k, width, dim));
            (first, gated.then_some(up), linear(step - 1, dim, width), None)
        }
    };
    let shared = (shared_ff > 0).then(|| {
        let module = |name: &str| format!("{shared}.{name}");
        let (gate, up, down) = match shared_fused {
            None => {
                let gate = gated.then(|| names.column(&module("gate_proj"), shared_ff, columns, false));
                (gate, names.column(&module("up_proj"), shared_ff, columns, false), "down_proj")
            }
            Some([both, down]) => {
                let (gate, up) = names.gate_and_up(&module(both), shared_ff, columns);
                (Some(gate), up, down)
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
    let (activation, normed) = (names.spec.activation, beside.is_some() || post.is_some());
    let weighs_inputs = experts.weighs_inputs;
    let experts =
        ExpertLayer { layer, index, top_k, gate, up, down, clamped, activation, normed, weighs_inputs, width: dim };
    let cut = names.split.cuts.mlp;
    SparseBranch { norm, cut, shape, router, router_bias, rule, experts, width: dim, shared, beside, post }
}

/// Tensors of an expert whose gate and up are one.
const CLAMPED_TENSORS: usize = 4;

//! An adapter alone as a GGUF file, as llama.cpp's `--lora` and Ollama's ADAPTER take it: the tensors are those of
//! llama.cpp's convert_lora_to_gguf.py (`tests/golden/gguf_files.py`). Never merges, and never reads a model's weights.
use super::super::adapter::LowRank;
use super::super::dirs;
use super::super::disk::{self, Disk};
use super::super::elements::storable;
use super::super::hf;
use super::super::merging::Merging;
use super::check::ignores_adapters;
use super::family::architecture;
use super::header::{GgufEntry, GgufKeys, KeyValue, header};
use super::model::{GgufName, GgufType, padded};
use super::order::GgufOrder;
use super::parts::GgufPart;
use super::quant::GgmlType;
use crate::base::{Error, Result};
use crate::nn::{Layout, Spec};
use std::path::Path;

/// One factor of a product, or of those of all experts.
struct Factor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
    form: GgmlType,
}

/// Writes the adapter in `dir`, which is of the model like `spec` in `base`, to `file`, in f32 unless `kind` is given.
/// Returns its size. [`super::check_file`] says what `file` may be.
pub fn save_adapter(
    [dir, base]: [&Path; 2],
    spec: &Spec,
    layouts: &[Layout],
    kind: Option<GgufType>,
    file: &Path,
) -> Result<u64> {
    let config = hf::flat(&hf::map_in(base)?);
    let (alpha, factors) = factors(dir, spec, layouts, kind)?;
    let mut keys = GgufKeys::default();
    keys.put("general.architecture", KeyValue::Text(architecture(spec.arch, &config)));
    keys.put("general.type", KeyValue::Text("adapter"));
    keys.put("adapter.type", KeyValue::Text("lora"));
    keys.put("general.name", KeyValue::Text(&file.file_stem().unwrap_or_default().to_string_lossy()));
    keys.put("adapter.lora.alpha", KeyValue::F32(f64::from(alpha)));
    keys.put("general.quantization_version", KeyValue::U32(2));
    let mut offset = 0;
    let entries: Vec<GgufEntry> = factors
        .iter()
        .map(|Factor { name, shape, form, values }| {
            let entry = GgufEntry { name, shape, form: *form, offset };
            offset += padded(form.bytes(values.len()));
            entry
        })
        .collect();
    let mut bytes = header(&keys, entries.into_iter());
    for Factor { name, values, form, .. } in &factors {
        storable(name, values, form.name(), form.most())?;
        form.encode(values, &mut bytes);
        bytes.resize(padded(bytes.len()) as usize, 0);
    }
    let (disk, name) = (Disk::default(), file.file_name().unwrap_or_default().to_string_lossy().into_owned());
    disk.make_dirs(disk::parent(file))?;
    dirs::sweep_unfinished(file)?;
    let unfinished = disk::parent(file).join(dirs::unfinished(&name, dirs::nonce()));
    let written = disk.write(&unfinished, &bytes).and_then(|()| dirs::publish(&disk, &unfinished, file));
    written.inspect_err(|_| drop(std::fs::remove_file(&unfinished)))?;
    Ok(bytes.len() as u64)
}

/// The alpha of the file, and all factors. llama.cpp multiplies each product by alpha / rank.
fn factors(dir: &Path, spec: &Spec, layouts: &[Layout], kind: Option<GgufType>) -> Result<(f32, Vec<Factor>)> {
    let refuse = |what: String| {
        Error::in_file(dir, format!("{what}, which an adapter in GGUF does not have: merge it, and export the model"))
    };
    let merging = Merging::open(dir, spec, layouts)?;
    if let Some(name) = merging.whole() {
        return Err(refuse(format!("holds {name} itself")));
    }
    let mut products = Vec::with_capacity(merging.products.len());
    for (source, product) in &merging.products {
        let what = if product.magnitude.is_some() {
            format!("has DoRA's norms of {source}")
        } else if source.ends_with(".bias") {
            format!("changes {source}")
        } else if ignores_adapters(spec, source) {
            format!("changes {source}, to which llama.cpp applies no adapter")
        } else if !GgufPart::of(spec, source).is_empty() {
            format!("changes {source}, which files have transposed or as two tensors")
        } else {
            products.push((source, GgufName::of(spec, source)?, product));
            continue;
        };
        return Err(refuse(what));
    }
    let alpha = products.first().map_or(0.0, |(.., first)| first.alpha());
    products.sort_by_key(|(source, name, _)| name.order(source));
    let mut factors = Vec::with_capacity(2 * products.len());
    for stack in products.chunk_by(|(_, a, _), (_, b, _)| a.name == b.name) {
        let [(source, GgufName { name, expert, .. }, first), ..] = stack else { continue };
        let experts = spec.experts.as_ref().map_or(0, |experts| experts.count);
        let is_whole = expert.is_none() || stack.len() == experts;
        if !is_whole || stack.iter().any(|(.., product)| product.rank() != first.rank()) {
            return Err(refuse(format!("changes some experts of {name} alone, or with other ranks")));
        }
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for (.., product) in stack {
            let (of_a, of_b) = sides(product, GgufOrder::of(spec, source));
            a.extend(of_a);
            b.extend(of_b.iter().map(|x| x * (product.alpha() / alpha)));
        }
        let of = |side: &str, values: Vec<f32>, columns: usize| {
            let count = expert.map(|_| experts);
            let rows = values.len() / columns / count.unwrap_or(1);
            let form = kind.map_or(GgmlType::F32, |kind| kind.of(&[rows, columns]));
            let shape = count.into_iter().chain([rows, columns]).collect();
            Factor { name: format!("{name}.lora_{side}"), shape, values, form }
        };
        // An embedding looks up the rows of its first factor.
        let columns = if first.transposed { first.rank() } else { a.len() / first.rank() / stack.len() };
        factors.extend([of("a", a, columns), of("b", b, first.rank())]);
    }
    Ok((alpha, factors))
}

/// A (rank, inputs) and B (outputs, rank) of a product; of an embedding, A (tokens, rank).
fn sides(product: &LowRank, order: GgufOrder) -> (Vec<f32>, Vec<f32>) {
    let (rank, (a, b)) = (product.rank(), product.factors());
    let columns = a.len() / rank;
    if product.transposed {
        let turned = (0..columns).flat_map(|column| (0..rank).map(move |k| a[k * columns + column]));
        return (b.to_vec(), turned.collect());
    }
    let moved = |values: &[f32], unit: usize| {
        let mut moved = vec![0.0; values.len()];
        for (index, stretch) in values.chunks_exact(unit).enumerate() {
            moved[order.place(index) * unit..][..unit].copy_from_slice(stretch);
        }
        moved
    };
    match order {
        GgufOrder::TiledColumns { width, .. } => (moved(a, width), b.to_vec()),
        _ => (a.to_vec(), moved(b, rank)),
    }
}

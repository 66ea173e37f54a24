//! Maps every element to a byte of a file, and decides which elements a rank writes. Files do not depend on the mesh:
//! tensors have the model's own global layout. Never touches the disk.
//!
//! safetensors: 8 bytes of header length (little-endian), a JSON header, and the tensors without gaps. The header is
//! padded with spaces so that the tensors start at [`DATA_ALIGN`].
use super::columns::ColumnHalf;
use super::gguf::coding::GgufCoding;
use super::mxfp4::Mxfp4;
use super::naming::Naming;
use super::slices::{self, NamedShape};
use super::transposed::Transposed;
use crate::base::{Error, Result};
use crate::device::ALIGN;
use crate::nn::{Layout, Segment, goes_with_adapters, has_adapters, is_adapter};
use crate::optim::Moments;
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::{cmp::Reverse, collections::HashMap, mem, ops::Range};

/// Offset of the first tensor in a file: one page.
pub const DATA_ALIGN: usize = 4096;
/// Maximum size of a model or optimizer file before the next one is started (as in `transformers`: 5 GB).
pub const MAX_FILE_BYTES: u64 = 5_000_000_000;

/// One tensor on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// F32 in checkpoints; also BF16 and F16 in exports and third-party models; any if it is carried through.
    pub dtype: Dtype,
    /// Index of its file.
    pub file: usize,
    /// Position of its first byte in the file.
    pub offset: u64,
    /// How its elements become those of `dtype`, if the file has others.
    pub coding: Option<Coding>,
    /// Set if it is columns of a wider matrix.
    pub columns: Option<ColumnHalf>,
}

/// How elements are stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Coding {
    Gguf(GgufCoding),
    Mxfp4(Mxfp4),
    Transposed(Transposed),
}

impl FileTensor {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn bytes(&self) -> u64 {
        byte_len(&self.shape, self.dtype)
    }
    /// Elements `place..place + len` in runs that follow each other in the file: which of them, and the first byte.
    pub fn runs(&self, place: usize, len: usize) -> impl Iterator<Item = (Range<usize>, u64)> + use<> {
        let (columns, offset, size) = (self.columns, self.offset, self.dtype.bitsize() / 8);
        let (end, row) = (place + len, columns.map_or(usize::MAX, |columns| columns.own.max(1)));
        (place / row..end.div_ceil(row)).map(move |i| {
            let (from, to) = ((i * row).max(place), (i + 1).saturating_mul(row).min(end));
            let at = columns.map_or(from, |columns| columns.place(from));
            (from - place..to - place, offset + (size * at) as u64)
        })
    }
}

/// What the files of a vision-language model have besides its text model, and how they name that.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    pub naming: Naming,
    pub tensors: Vec<FileTensor>,
}

/// The tensors of a checkpoint: those of the model in layout order, then for each moment of the optimizer one per
/// trainable tensor.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    pub list: Vec<FileTensor>,
    /// This rank's part of each.
    parts: Vec<Segment>,
    /// Index of the model's tensor, then of its moments.
    by_name: HashMap<String, Vec<Option<usize>>>,
    model: usize,
}

impl Tensors {
    /// Index of a tensor. `group` 0 is the model, group i the optimizer's moment i - 1; `name` is the name in the
    /// model.
    pub fn find(&self, group: usize, name: &str) -> Result<usize> {
        match self.by_name.get(name).map(|groups| groups.get(group).copied().flatten()) {
            Some(Some(place)) => Ok(place),
            Some(None) => Err(Error::op("checkpoint", format!("{name} has no moment {group}"))),
            None => Err(Error::op("checkpoint", format!("the store has {name}, which the model does not"))),
        }
    }
    /// Whether the model's tensor `name` is stored; frozen ones next to adapters are not.
    pub fn holds(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }
    /// Splits elements `range` of this rank's part of tensor `index` into runs that are contiguous in the tensor, each
    /// with the index of its first element there.
    pub fn stretches(&self, index: usize, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.parts[index].stretches(range)
    }
    /// This rank's part of tensor `index`.
    pub fn part(&self, index: usize) -> &Segment {
        &self.parts[index]
    }
    /// Number of tensors that belong to the model.
    pub fn model(&self) -> usize {
        self.model
    }
}

/// One file of the plan.
#[derive(Clone, Debug)]
pub struct PlannedFile {
    pub name: String,
    /// Length, JSON and padding: everything before the tensors.
    pub header: Vec<u8>,
    /// Header and tensors.
    pub bytes: u64,
}

/// Prefix of adapter tensor names in files (PEFT's).
pub const ADAPTER_PREFIX: &str = "base_model.model.";

#[derive(Clone, Debug)]
pub struct FilePlan {
    /// Base name of the model's files: `model` or `adapter_model`.
    pub stem: &'static str,
    pub tensors: Tensors,
    /// What a vision-language model has besides its text model, in the order of [`Carried::tensors`].
    pub carried: Vec<FileTensor>,
    pub files: Vec<PlannedFile>,
    /// Index files such as `model.safetensors.index.json`, as (name, text), for base names with several files.
    pub indices: Vec<(String, String)>,
}

impl FilePlan {
    /// The plan of a checkpoint: everything in f32. `layouts`: this rank's part of the model, in layer order.
    /// `moments`: the optimizer's states ("exp_avg", ...), stored as `{moment}.{tensor}` in `optimizer*.safetensors`.
    pub fn of_masters(
        layouts: &[Layout],
        moments: &Moments,
        max_file_bytes: u64,
        carried: Option<&Carried>,
    ) -> FilePlan {
        FilePlan::new(layouts, moments, Dtype::F32, max_file_bytes, carried)
    }

    /// The plan with the model's tensors in `dtype`: f32, or bf16 or f16 for exports. If there are adapters, only
    /// they are stored, and the score head of a reward model. `carried`: what the model has besides its text model.
    pub fn new(
        layouts: &[Layout],
        moments: &Moments,
        dtype: Dtype,
        max_file_bytes: u64,
        carried: Option<&Carried>,
    ) -> FilePlan {
        FilePlan::part(layouts, has_adapters(layouts), moments, dtype, max_file_bytes, carried)
    }

    /// The model without its adapters, which a run with adapters starts from.
    pub fn of_base(layouts: &[Layout], carried: Option<&Carried>) -> FilePlan {
        FilePlan::part(layouts, false, &Moments::NONE, Dtype::F32, u64::MAX, carried)
    }

    /// The base model without tensor `name`.
    pub fn without(layouts: &[Layout], name: &str) -> FilePlan {
        let mut layouts = layouts.to_vec();
        layouts.iter_mut().for_each(|layout| layout.segments.retain(|segment| segment.name != name));
        FilePlan::of_base(&layouts, None)
    }

    /// The number of tensors of [`FilePlan::of_masters`], apart from those that are carried.
    pub fn count(layouts: &[Layout], moments: &Moments) -> usize {
        let stored = stored(has_adapters(layouts));
        let all = layouts.iter().enumerate().flat_map(|(layer, l)| l.segments.iter().map(move |s| (layer, s)));
        let states = |(layer, segment)| (0..moments.names.len()).filter(|m| moments.has(*m, layer, segment)).count();
        all.filter(|(_, segment)| stored(segment)).map(|place| 1 + states(place)).sum()
    }

    fn part(
        layouts: &[Layout],
        adapters: bool,
        moments: &Moments,
        dtype: Dtype,
        max_file_bytes: u64,
        carried: Option<&Carried>,
    ) -> FilePlan {
        // PEFT names the modules, whatever the names in files.
        let naming = match carried.map_or(Naming::Plain, |carried| carried.naming) {
            Naming::Plain if adapters => Naming::Plain,
            Naming::Plain => Naming::of_class(layouts.iter().flat_map(|l| &l.segments).map(|s| s.name.as_str())),
            naming if adapters => naming.of_modules(),
            naming => naming,
        };
        let stored = stored(adapters);
        let segments = layouts.iter().enumerate().flat_map(|(layer, l)| l.segments.iter().map(move |s| (layer, s)));
        let segments: Vec<(usize, &Segment)> = segments.filter(|(_, s)| stored(s)).collect();
        let (stem, prefix) = if adapters { ("adapter_model", ADAPTER_PREFIX) } else { ("model", "") };
        let mut places = 0..;
        let mut groups = vec![Vec::new(); segments.len()];
        let (mut parts, mut names) = (Vec::new(), [Vec::new(), Vec::new()]);
        for group in 0..=moments.names.len() {
            let file_name = |name: &str| match group {
                0 => format!("{prefix}{}", naming.file_name(name)),
                _ => format!("{}.{name}", moments.names[group - 1]),
            };
            let dtype = if group == 0 { dtype } else { Dtype::F32 };
            for ((layer, segment), places_of) in segments.iter().zip(&mut groups) {
                let kept = group == 0 || moments.has(group - 1, *layer, segment);
                places_of.push(if kept { places.next() } else { None });
                if kept {
                    parts.push((*segment).clone());
                    names[group.min(1)].push((file_name(&segment.name), segment.global_shape(), dtype));
                }
            }
        }
        let [mut model, state] = names;
        let carried = carried.filter(|_| !adapters).map_or(&[][..], |carried| &carried.tensors);
        model.extend(carried.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone(), tensor.dtype)));
        let by_name = segments.iter().map(|(_, s)| s.name.clone()).zip(groups).collect();
        let tensors = Tensors { list: Vec::with_capacity(parts.len()), parts, by_name, model: segments.len() };
        let mut plan = FilePlan { stem, tensors, carried: Vec::new(), files: Vec::new(), indices: Vec::new() };
        plan.append(stem, model, max_file_bytes);
        plan.carried = plan.tensors.list.split_off(segments.len());
        if !moments.names.is_empty() {
            plan.append("optimizer", state, max_file_bytes);
        }
        plan
    }

    /// Adds the files of one base name: a single file, or several `stem-0000i-of-0000n` and an index.
    fn append(&mut self, stem: &str, tensors: Vec<NamedShape>, max_file_bytes: u64) {
        let (mut files, mut file, mut filled) = (Vec::new(), Vec::new(), 0);
        let mut own = vec![(0, 0); tensors.len()];
        for (tensor, slices) in slices::whole(&tensors) {
            let size = byte_len(&tensor.1, tensor.2);
            if filled > 0 && filled + size > max_file_bytes {
                files.push(mem::take(&mut file));
                filled = 0;
            }
            filled += size;
            file.push((tensor, slices));
        }
        files.push(file);
        let (count, mut weight_map, mut total) = (files.len(), Map::new(), 0);
        for (i, tensors) in files.into_iter().enumerate() {
            let name = match count {
                1 => format!("{stem}.safetensors"),
                _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
            };
            // Each begins at a multiple of its element's size, which PyTorch needs: there are no gaps.
            let mut order: Vec<usize> = (0..tensors.len()).collect();
            order.sort_by_key(|&i| Reverse(tensors[i].0.2.bitsize()));
            let header = header(order.iter().map(|&i| &tensors[i].0));
            let (mut offsets, mut end) = (vec![0; tensors.len()], header.len() as u64);
            for i in order {
                offsets[i] = end;
                end += byte_len(&tensors[i].0.1, tensors[i].0.2);
            }
            total += end - header.len() as u64;
            let file = self.files.len();
            for (((name_of, shape, dtype), slices), offset) in tensors.into_iter().zip(offsets) {
                weight_map.insert(name_of, json!(name));
                let each = byte_len(&shape, dtype) / slices.len() as u64;
                for (place, i) in slices.into_iter().enumerate() {
                    own[i] = (file, offset + place as u64 * each);
                }
            }
            self.files.push(PlannedFile { name, header, bytes: end });
        }
        for ((name, shape, dtype), (file, offset)) in tensors.into_iter().zip(own) {
            let columns = ColumnHalf::of(&name, &shape);
            let offset = offset - columns.map_or(0, |columns| byte_len(&[columns.before()], dtype));
            self.tensors.list.push(FileTensor { name, shape, dtype, file, offset, coding: None, columns });
        }
        if count > 1 {
            weight_map.sort_keys();
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            self.indices.push((format!("{stem}.safetensors.index.json"), pretty(&index)));
        }
    }

    /// Total size of all files, headers included.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes).sum()
    }
}

/// The tensors that go into files.
fn stored(adapters: bool) -> fn(&Segment) -> bool {
    if adapters { goes_with_adapters } else { |segment| !is_adapter(segment) }
}

fn byte_len(shape: &[usize], dtype: Dtype) -> u64 {
    (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64
}

/// Length, JSON with sorted names, spaces up to [`DATA_ALIGN`].
fn header<'a>(tensors: impl Iterator<Item = &'a NamedShape>) -> Vec<u8> {
    let mut entries = Map::new();
    let mut at = 0;
    for (name, shape, dtype) in tensors {
        let end = at + byte_len(shape, *dtype);
        entries.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    entries.sort_keys();
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize((8 + text.len()).next_multiple_of(DATA_ALIGN) - 8, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Pretty-printed JSON with a trailing newline.
pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// A range of one tensor inside a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ElementRun<'a> {
    pub segment: &'a Segment,
    /// First element, counted in this rank's part of the tensor; a multiple of [`ALIGN`].
    pub at: usize,
    /// The elements within the shard.
    pub range: Range<usize>,
}

/// Which part of its shards a rank writes, so that every element is written exactly once.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Part `index` of `of`: replicas with the same shard share the writing.
    pub index: usize,
    pub of: usize,
    /// Also write the tensors that every rank of tp has in full; the first of them does.
    pub whole: bool,
}
impl Share {
    /// Everything a rank holds, which is what it reads.
    pub const ALL: Share = Share { index: 0, of: 1, whole: true };

    /// Whether any part of the tensor belongs to this share.
    pub fn has(self, segment: &Segment) -> bool {
        self.whole || segment.tp.is_cut()
    }

    /// This share of `len` elements, split at multiples of [`ALIGN`].
    fn range(self, len: usize) -> Range<usize> {
        let part = len.div_ceil(self.of).next_multiple_of(ALIGN);
        (self.index * part).min(len)..((self.index + 1) * part).min(len)
    }
}

impl ElementRun<'_> {
    /// At most `most` elements at a time: where they are in the shard, and the first one in its tensor.
    pub fn chunks(&self, most: usize) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
        let (Range { start, end }, at) = (self.range.clone(), self.at);
        (start..end).step_by(most).map(move |from| (from..end.min(from + most), at + from - start))
    }
}

/// The elements (no padding) of a shard that starts at `start` of its unit and is `len` long, restricted to `share`.
pub fn runs(layout: &Layout, start: usize, len: usize, share: Share) -> impl Iterator<Item = ElementRun<'_>> {
    let part = share.range(len);
    let piece = start + part.start..start + part.end;
    layout.segments.iter().filter(move |segment| share.has(segment)).filter_map(move |segment| {
        let all = segment.range();
        let (from, to) = (all.start.max(piece.start), all.end.min(piece.end));
        (from < to).then(|| ElementRun { segment, at: from - all.start, range: from - start..to - start })
    })
}

#[cfg(test)]
mod tests {
    use super::super::checksum::checksum;
    use super::*;
    use crate::nn::{Init, Slice, Tp};
    use crate::optim::Rule;
    use safetensors::SafeTensors;

    fn layouts() -> Vec<Layout> {
        let mut root = Layout::default();
        root.push("embed.weight", &[10, 30], true, Init::Normal(0.02));
        root.push("norm.weight", &[30], false, Init::Constant(1.0));
        let mut block = Layout::default();
        block.push("0.q.weight", &[130], true, Init::Normal(0.02));
        vec![root, block]
    }

    /// The `safetensors` crate reads every file of the plan, and finds the tensors where the plan says.
    #[test]
    fn plan_is_read_by_the_safetensors_crate() {
        for (max, files) in [(MAX_FILE_BYTES, 2), (1, 9), (1300, 6)] {
            let plan = FilePlan::of_masters(&layouts(), &Rule::default().state(), max, None);
            assert_eq!(plan.files.len(), files, "files of at most {max} bytes");
            assert_eq!(plan.indices.is_empty(), max == MAX_FILE_BYTES);
            for (f, file) in plan.files.iter().enumerate() {
                let bytes: Vec<u8> = file
                    .header
                    .iter()
                    .copied()
                    .chain((0..).map(|i: u32| (i % 251) as u8))
                    .take(file.bytes as usize)
                    .collect();
                assert_eq!(file.header.len() % DATA_ALIGN, 0);
                let read = SafeTensors::deserialize(&bytes).unwrap();
                let mine: Vec<&FileTensor> = plan.tensors.list.iter().filter(|t| t.file == f).collect();
                assert_eq!(read.len(), mine.len());
                for t in mine {
                    let view = read.tensor(&t.name).unwrap();
                    assert_eq!((view.shape(), view.dtype()), (&t.shape[..], Dtype::F32));
                    let at = t.offset as usize;
                    assert_eq!(view.data(), &bytes[at..at + 4 * t.len()]);
                }
            }
        }
        let plan = FilePlan::of_masters(&layouts(), &Rule::default().state(), 1300, None);
        let index: Value = serde_json::from_str(&plan.indices[0].1).unwrap();
        assert_eq!(index["weight_map"]["0.q.weight"], "model-00002-of-00002.safetensors");
        assert_eq!(index["metadata"]["total_size"], 4 * (300 + 30 + 130));
        assert_eq!(plan.tensors.list[plan.tensors.find(2, "norm.weight").unwrap()].name, "exp_avg_sq.norm.weight");
    }

    /// Carried tensors have a dtype of their own, and any number of bytes.
    #[test]
    fn carried_tensors_are_aligned_next_to_narrower_ones() {
        let carried = |name: &str, shape: &[usize], dtype| FileTensor {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            file: 0,
            offset: 0,
            coding: None,
            columns: None,
        };
        let tensors = vec![
            carried("eye.bytes", &[3], Dtype::U8),
            carried("eye.weight", &[5], Dtype::F32),
            carried("eye.half", &[1], Dtype::F16),
        ];
        let carried = Carried { naming: Naming::Around, tensors };
        let plan = FilePlan::new(&layouts(), &Moments::NONE, Dtype::BF16, MAX_FILE_BYTES, Some(&carried));
        assert_eq!((plan.tensors.list.len(), plan.carried.len()), (3, 3));
        let mut bytes = plan.files[0].header.clone();
        bytes.resize(plan.bytes() as usize, 0);
        let read = SafeTensors::deserialize(&bytes).unwrap();
        for t in plan.tensors.list.iter().chain(&plan.carried) {
            let view = read.tensor(&t.name).unwrap();
            assert_eq!((view.shape(), view.dtype()), (&t.shape[..], t.dtype));
            assert_eq!(view.data().as_ptr(), bytes[t.offset as usize..].as_ptr(), "{}", t.name);
            assert!(t.offset.is_multiple_of(t.dtype.bitsize() as u64 / 8), "{} at {}", t.name, t.offset);
        }
    }

    /// Any division into shards, shares and tp ranks visits each element of each tensor once, and partial checksums sum
    /// to that of the whole.
    #[test]
    fn runs_cover_each_element_once_and_checksums_add_up() {
        let value = |i: usize| i as f32;
        let bytes = |range: Range<usize>| -> Vec<u8> { range.flat_map(|i| value(i).to_le_bytes()).collect() };
        let shapes: [(&[usize], Option<usize>); 4] =
            [(&[12, 30], Some(0)), (&[30], None), (&[10, 24], Some(1)), (&[520], Some(0))];
        let unit = |index: usize, of: usize| {
            let mut unit = Layout::default();
            for (i, (shape, cut)) in shapes.iter().enumerate() {
                let (mut shape, mut tp, over) = (shape.to_vec(), Tp::Same, Slice { index, of });
                if let Some(dim) = *cut {
                    tp = Tp::Cut { dim, over, whole: shape[dim] };
                    shape[dim] = over.share(shape[dim]).len();
                }
                unit.push_part(format!("t{i}"), &shape, tp, true, Init::Constant(0.0));
            }
            unit
        };
        let lens = shapes.map(|(shape, _)| shape.iter().product::<usize>());
        let whole = lens.map(|len| checksum(&bytes(0..len), 0));
        for (pieces, of, tp) in [
            (1, 1, 1),
            (1, 3, 1),
            (2, 1, 1),
            (3, 2, 1),
            (9, 1, 1),
            (1, 1, 2),
            (3, 1, 2),
            (2, 3, 2),
            (1, 2, 4),
            (2, 1, 7),
        ] {
            let (mut seen, mut sums) = (lens.map(|len| vec![0; len]), [0u64; 4]);
            for rank in 0..tp {
                let unit = unit(rank, tp);
                let (all, none) = (std::slice::from_ref(&unit), &Moments::NONE);
                let tensors = FilePlan::of_masters(all, none, u64::MAX, None).tensors;
                let len = unit.len.div_ceil(pieces).next_multiple_of(ALIGN);
                for (piece, index) in (0..pieces).flat_map(|piece| (0..of).map(move |index| (piece, index))) {
                    for run in runs(&unit, piece * len, len, Share { index, of, whole: rank == 0 }) {
                        assert_eq!(run.at % ALIGN, 0);
                        assert_eq!(run.range.start + piece * len, run.segment.start + run.at);
                        let i = tensors.find(0, &run.segment.name).unwrap();
                        for (part, at) in tensors.stretches(i, run.at..run.at + run.range.len()) {
                            seen[i][at..at + part.len()].iter_mut().for_each(|n| *n += 1);
                            sums[i] = sums[i].wrapping_add(checksum(&bytes(at..at + part.len()), at));
                        }
                    }
                }
            }
            let what = format!("{pieces} pieces in {of} shares over tp {tp}");
            assert!(seen.iter().flatten().all(|&n| n == 1), "{what}: {seen:?}");
            assert_eq!(sums, whole, "{what}");
        }
    }
}

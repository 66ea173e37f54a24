//! What a render of a chat template has read and made, and the limits of that: a text or a list is charged before it is
//! made, a value before it is read deeply. Never reads a template.
use minijinja::value::{Object, ObjectRepr, Value};
use minijinja::{Error, ErrorKind, State};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of text and lists produced per conversation.
const MADE: u64 = 512 << 20;
/// Bytes read per conversation, where a value counts 64 and text its length.
const READ: u64 = 16 << 30;
/// Limits of one value: parts, bytes of text, nesting levels.
pub(super) const PARTS: u64 = 1_000_000;
const TEXT: u64 = 16 << 20; // a list of its letters takes 24 times the memory
const DEEP: u32 = 64;

/// Resources used by a render so far.
#[derive(Debug, Default)]
struct Used {
    made: AtomicU64,
    read: AtomicU64,
}
impl Object for Used {}

pub(super) fn too_much(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Charges `bytes` that are about to be produced, or were.
pub(super) fn spend(state: &State, bytes: u64) -> Result<(), Error> {
    let used = state.get_or_set_temp_object("=used", Used::default);
    match used.made.fetch_add(bytes.min(MADE + 1), Relaxed).saturating_add(bytes) <= MADE {
        true => Ok(()),
        false => Err(too_much(format!("the template makes more than {} MiB of text for one conversation", MADE >> 20))),
    }
}

pub(super) fn read(state: &State, bytes: u64) -> Result<(), Error> {
    let used = state.get_or_set_temp_object("=used", Used::default);
    match used.read.fetch_add(bytes.min(READ + 1), Relaxed).saturating_add(bytes) <= READ {
        true => Ok(()),
        false => Err(too_much(format!("the template reads more than {} GiB for one conversation", READ >> 30))),
    }
}

/// The weight of a value with everything it contains, counting repeated parts every time.
#[derive(Default)]
pub(super) struct Weight {
    pub parts: u64,
    pub text: u64,
    pub depth: u32,
}

impl Weight {
    fn add(&mut self, value: &Value, depth: u32) -> Result<(), Error> {
        self.parts += 1;
        self.depth = self.depth.max(depth);
        self.text += value.as_str().map_or(0, str::len).max(value.as_bytes().map_or(0, <[u8]>::len)) as u64;
        if self.parts > PARTS || self.text > TEXT || depth > DEEP {
            return Err(too_much(format!(
                "the template computes with a value of more than {PARTS} parts, {} MiB of text or {DEEP} levels",
                TEXT >> 20
            )));
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        match object.repr() {
            ObjectRepr::Map => object.try_iter_pairs().into_iter().flatten().try_for_each(|(key, value)| {
                self.add(&key, depth + 1)?;
                self.add(&value, depth + 1)
            }),
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                object.try_iter().into_iter().flatten().try_for_each(|value| self.add(&value, depth + 1))
            }
            _ => Ok(()),
        }
    }
}

/// Charges what it takes to read all of `values`.
pub(super) fn weigh(state: &State, values: &[Value]) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    values.iter().try_for_each(|value| weight.add(value, 0))?;
    read(state, 64 * weight.parts + weight.text)?;
    Ok(weight)
}

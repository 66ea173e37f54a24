//! Live bytes by category and their peak, which a memory plan is checked against. Memory offloaded to the host has its
//! own category and is excluded from totals. The meter records each buffer's purpose, so that an out-of-memory error
//! can list what holds the memory. Never allocates buffers itself.
use super::history::History;
use super::{CATEGORIES, Category, DType, Error};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

#[derive(Default, Debug)]
struct Counts {
    live: [AtomicUsize; CATEGORIES.len()],
    total: AtomicUsize,
    peak: AtomicUsize,
    allocations: AtomicUsize,
    book: Mutex<Book>,
    history: OnceLock<History>,
}

/// Live leases by kind: updated when buffers are created and dropped, read when an allocation fails.
#[derive(Default, Debug)]
struct Book {
    /// Purpose of the next leases.
    purpose: &'static str,
    /// The number of identical leases.
    held: BTreeMap<LeaseKind, usize>,
}
impl Counts {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Records that the bytes of a category changed.
    fn record(&self, category: Category) {
        if let Some(history) = self.history.get() {
            history.changed(category as usize, self.live[category as usize].load(Relaxed));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct LeaseKind {
    category: Category,
    purpose: &'static str,
    /// Element type and count, where known.
    elements: Option<(DType, usize)>,
    /// Bytes counted on this rank: its share of a buffer that the ranks of a host share.
    bytes: usize,
}
impl fmt::Display for LeaseKind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let purpose = if self.purpose.is_empty() { self.category.name() } else { self.purpose };
        write!(f, "{} {purpose} ({}", mib(self.bytes), self.category.name())?;
        match self.elements {
            Some((dtype, len)) => write!(f, ", {len} {dtype})"),
            None => write!(f, ")"),
        }
    }
}
/// "12.3 MiB".
fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// How many kinds of buffer an error lists.
const LISTED: usize = 10;

/// Shared by the device and the groups of one rank. Clones count together.
#[derive(Clone, Default, Debug)]
pub struct Meter(Arc<Counts>);

/// Counts its bytes until dropped.
#[derive(Debug)]
pub struct Lease {
    counts: Arc<Counts>,
    kind: LeaseKind,
}

/// Sets the purpose of new buffers until dropped.
#[must_use]
pub struct Purpose {
    counts: Arc<Counts>,
    before: &'static str,
}
impl Drop for Purpose {
    fn drop(&mut self) {
        self.counts.book().purpose = self.before;
    }
}

impl Meter {
    /// Labels everything leased from now on, on the device or in a group, as being for `what`. Purposes nest; the
    /// innermost applies.
    pub fn purpose(&self, what: &'static str) -> Purpose {
        let before = std::mem::replace(&mut self.0.book().purpose, what);
        Purpose { counts: self.0.clone(), before }
    }
    pub fn lease(&self, category: Category, bytes: usize) -> Lease {
        self.count(category, None, bytes)
    }
    /// A lease of `len` elements, of which this rank counts `bytes`.
    pub fn lease_of(&self, category: Category, dtype: DType, len: usize, bytes: usize) -> Lease {
        self.count(category, Some((dtype, len)), bytes)
    }
    fn count(&self, category: Category, elements: Option<(DType, usize)>, bytes: usize) -> Lease {
        let c = &self.0;
        c.live[category as usize].fetch_add(bytes, Relaxed);
        c.allocations.fetch_add(1, Relaxed);
        if category != Category::Host {
            let total = c.total.fetch_add(bytes, Relaxed) + bytes;
            c.peak.fetch_max(total, Relaxed);
        }
        let mut book = c.book();
        let kind = LeaseKind { category, purpose: book.purpose, elements, bytes };
        *book.held.entry(kind).or_default() += 1;
        drop(book);
        c.record(category);
        Lease { counts: c.clone(), kind }
    }
    /// Records every change from now on in `history`. Only the first call has an effect.
    pub fn keep(&self, history: &History) {
        let _ = self.0.history.set(history.clone());
    }
    pub fn live(&self, category: Category) -> usize {
        self.0.live[category as usize].load(Relaxed)
    }
    /// Total on the device; like the peak, it excludes host memory.
    pub fn total(&self) -> usize {
        self.0.total.load(Relaxed)
    }
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }
    /// Describes live memory for an out-of-memory error: the total of each category and the largest buffers by name.
    pub fn dump(&self) -> String {
        let held = self.0.book().held.clone();
        let mut largest: Vec<(&LeaseKind, &usize)> = held.iter().collect();
        largest.sort_by_key(|(kind, count)| std::cmp::Reverse(kind.bytes * **count));
        let totals = CATEGORIES.iter().map(|&(category, name)| (self.live(category), name)).filter(|t| t.0 > 0);
        let totals: Vec<String> = totals.map(|(bytes, name)| format!("{name} {}", mib(bytes))).collect();
        let largest: Vec<String> =
            largest.iter().take(LISTED).map(|(kind, count)| format!("{count} x {kind}")).collect();
        format!(
            "this rank holds {} in {} buffers: {}; largest first: {}",
            mib(CATEGORIES.iter().map(|c| self.live(c.0)).sum()),
            held.values().sum::<usize>(),
            totals.join(", "),
            largest.join(", ")
        )
    }
    /// How many buffers were ever allocated. A test asserts that steps do not change it.
    pub fn allocations(&self) -> usize {
        self.0.allocations.load(Relaxed)
    }
}
impl Lease {
    /// The error for a buffer that could not be allocated: `why`, and what holds the memory.
    pub fn refused(self, why: impl fmt::Display) -> Error {
        let (meter, kind) = (Meter(self.counts.clone()), self.kind);
        drop(self);
        Error::Run(format!("out of memory: {kind} failed: {why}; {}. {REMEDY}", meter.dump()))
    }
}
/// How to use less memory.
pub const REMEDY: &str =
    "Use `activation_checkpoint`, `precision: bf16`, a smaller `batch_size` or `max_len`, or more ranks on more hosts";

impl Drop for Lease {
    fn drop(&mut self) {
        let LeaseKind { category, bytes, .. } = self.kind;
        self.counts.live[category as usize].fetch_sub(bytes, Relaxed);
        if category != Category::Host {
            self.counts.total.fetch_sub(bytes, Relaxed);
        }
        self.counts.record(category);
        let mut book = self.counts.book();
        if let Some(count) = book.held.get_mut(&self.kind) {
            *count -= 1;
            if *count == 0 {
                book.held.remove(&self.kind);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_listed_by_name_largest_first_and_given_back() {
        let meter = Meter::default();
        let lease = |category, len: usize| meter.lease_of(category, DType::F32, len, 4 * len);
        let masters = {
            let _masters = meter.purpose("masters");
            let one = lease(Category::Params, 1 << 18);
            let _inner = meter.purpose("norms");
            let two = lease(Category::Params, 1 << 16);
            [one, two, lease(Category::Params, 1 << 16)]
        };
        let slots: Vec<Lease> = (0..3).map(|_| meter.lease(Category::Slots, 1 << 20)).collect();
        let refused = meter.lease_of(Category::Scratch, DType::Bf16, 1 << 30, 2 << 30);
        let text = refused.refused("Cannot allocate memory").to_string();
        let expected = format!(
            "out of memory: 2048.0 MiB scratch (scratch, 1073741824 bf16) failed: Cannot allocate memory; this rank holds \
             4.5 MiB in 6 buffers: params 1.5 MiB, slots 3.0 MiB; largest first: 3 x 1.0 MiB slots (slots), 1 x 1.0 MiB masters \
             (params, 262144 f32), 2 x 0.2 MiB norms (params, 65536 f32). {REMEDY}"
        );
        assert_eq!(text, expected);
        drop((masters, slots));
        assert_eq!((meter.total(), meter.allocations()), (0, 7));
        assert!(meter.dump().starts_with("this rank holds 0.0 MiB in 0 buffers: ; "), "{}", meter.dump());
    }
}

//! The CPU device: dispatches each operation to the compiled variant for its dtype and vector width, in parts that its
//! threads compute side by side. Runs every operation synchronously. Never computes itself.
//!
//! [Note: threads] An operation has the same bits for any number of threads: parts are rows or columns of the result,
//! and each of its elements is computed as by a single thread. Gradients of weights, which are sums over rows, are
//! divided by columns; the loss is summed by the caller, in row order; the sum of squares is exact.
use super::divide::{Divisible, LINE};
use super::operands::length;
use super::pool::Pool;
use super::simd::Level;
use super::tile::AttentionScratch;
use super::{activation, attention, dropout, element, embed, gemm, loss, memory, norm, optim, reduce, ring, rope};
use crate::base::{Category, DType, Error, Meter, Result};
use crate::device::buf::Place;
use crate::device::ops::{
    ALIGN, AdamW, Attention, AttentionBackward, AttentionDelta, AttentionMerge, AttentionPass, AttentionPassBackward,
    AttentionRanges, AttentionShape, Bias, BiasBackward, ClipScale, CopyColumns, CrossEntropy, CrossEntropyFinish,
    CrossEntropyPart, Dropout, DropoutRows, Embed, EmbedBackward, Gelu, GeluBackward, Gemm, GemmThen, Glu, GluBackward,
    LIMBS, LayerNorm, LayerNormBackward, QkNormRope, QkNormRopeBackward, RmsNorm, RmsNormBackward, Rope, Sgd,
    SumSquares,
};
use crate::device::pages::{self, HUGE};
use crate::device::{Buf, Device, View, ViewMut, epilogue, unbacked};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub struct CpuDevice {
    meter: Meter,
    level: Level,
    pool: Pool,
    /// Bytes of an operation's main operand that are worth a thread.
    grain: usize,
    /// For each thread.
    gemm: Vec<Mutex<gemm::GemmScratch>>,
    attention: Vec<Mutex<AttentionScratch>>,
    /// f64: losses of rows, of calls with several threads. Grows to the largest call.
    losses: Mutex<Option<Buf>>,
    /// Set for planning, where buffers are addresses only: the scratch size of attention's backward on the target
    /// device.
    unbacked: Option<AttentionSums>,
}

/// As [`Device::attention_sums`].
pub type AttentionSums = fn(&AttentionShape, DType, usize) -> usize;

/// By default, work of some 5 us is worth a thread: several times what it takes to wake one.
const GRAIN: usize = 32 << 10;

/// Bytes of a buffer whose pages are put in place when it is allocated: fewer faults take less than the call.
const WORTH_TOUCHING: usize = 64 << 10;

impl CpuDevice {
    /// Bytes of scratch of a thread that computes products, at most, which the meter does not count.
    pub const SCRATCH: usize = 9 << 20;

    /// Uses the widest vectors that this CPU has, and the caller's thread alone.
    pub fn new(meter: Meter) -> CpuDevice {
        CpuDevice::with_scratch(meter, gemm::GemmScratch::new())
    }
    /// Computes on `threads` threads, at least 1: the caller's, and others that live as long as the device and may run
    /// on the same CPUs as the thread that creates it. Results have the same bits for any number.
    pub fn with_threads(self, threads: usize) -> Result<CpuDevice> {
        let (products, tiles) = (lock(&self.gemm[0]).kernel(), lock(&self.attention[0]).kernel);
        let gemm = (0..threads.max(1)).map(|_| gemm::GemmScratch::with_kernel(products).map(Mutex::new));
        let attention = (0..threads.max(1)).map(|_| Mutex::new(AttentionScratch::new(tiles))).collect();
        Ok(CpuDevice { pool: Pool::start(threads)?, gemm: gemm.collect::<Result<_>>()?, attention, ..self })
    }
    /// Gives threads smaller or larger parts, for tests and comparisons: of at least so many bytes of the main operand.
    pub fn with_grain(self, bytes: usize) -> CpuDevice {
        CpuDevice { grain: bytes.max(1), ..self }
    }
    fn with_scratch(meter: Meter, gemm: gemm::GemmScratch) -> CpuDevice {
        CpuDevice {
            meter,
            level: Level::best(),
            pool: Pool::default(),
            grain: GRAIN,
            attention: vec![Mutex::new(AttentionScratch::new(gemm.kernel()))],
            gemm: vec![Mutex::new(gemm)],
            losses: Mutex::default(),
            unbacked: None,
        }
    }
    /// Uses narrower vectors, and f32 products in attention, for tests and comparisons: all levels give the same bits.
    /// The matrix product chooses independently. Fails if this CPU lacks them.
    pub fn with_level(meter: Meter, level: Level) -> Result<CpuDevice> {
        if !level.available() {
            return Err(Error::op("cpu device", format!("this CPU does not support {level}, only {}", Level::best())));
        }
        let attention = vec![Mutex::new(AttentionScratch::new(gemm::GemmKernel::Plain))];
        Ok(CpuDevice { level, attention, ..CpuDevice::new(meter) })
    }
    /// A device for planning: it allocates addresses without memory, discards uploads, and computes nothing.
    pub fn unbacked(meter: Meter, sums: AttentionSums) -> CpuDevice {
        CpuDevice { unbacked: Some(sums), ..CpuDevice::new(meter) }
    }
    /// Uses another kernel for matrix products and attention, for tests and comparisons. Fails if this CPU lacks it.
    pub fn with_kernel(meter: Meter, kernel: gemm::GemmKernel) -> Result<CpuDevice> {
        Ok(CpuDevice::with_scratch(meter, gemm::GemmScratch::with_kernel(kernel)?))
    }

    /// Threads that an operation is worth, by the bytes of its main operand.
    fn worth(&self, bytes: usize) -> usize {
        self.pool.threads().min(bytes / self.grain).max(1)
    }
    /// Runs `run(thread, part)` for parts of `0..n` that start at multiples of `step`, one per thread that `bytes` of
    /// work are worth.
    fn parts(
        &self,
        (n, step, bytes): (usize, usize, usize),
        run: &(dyn Fn(usize, Range<usize>) -> Result<()> + Sync),
    ) -> Result<()> {
        let mut each = n.div_ceil(self.worth(bytes)).next_multiple_of(step);
        if each >= n {
            return run(0, 0..n);
        }
        // Products of a single row have loops of their own: none of several rows is left alone.
        while step > 1 && n % each == 1 {
            each += step;
        }
        let failed = Mutex::new(None);
        self.pool.run(n.div_ceil(each), &|thread, part| {
            if let Err(e) = run(thread, part * each..n.min((part + 1) * each)) {
                lock(&failed).get_or_insert(e);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
    /// A new buffer with its pages in place.
    fn touched(&self, mut buf: Buf) -> Result<Buf> {
        let (at, bytes) = (BufferStart(buf.view_mut().as_mut_ptr()), buf.bytes());
        if bytes >= WORTH_TOUCHING {
            self.parts((bytes, HUGE, bytes), &|_, part| {
                // SAFETY: the buffer was mapped for this many bytes, and parts start at multiples of huge pages.
                unsafe { pages::touch(at.get().add(part.start), part.len()) };
                Ok(())
            })?;
        }
        Ok(buf)
    }
    /// Runs an operation in parts.
    fn rows<O: Divisible + Sync>(&self, op: O, run: &(dyn Fn(O) -> Result<()> + Sync)) -> Result<()> {
        self.rows_on(O::STEP, op, &|_, op| run(op))
    }
    fn rows_on<O: Divisible + Sync>(
        &self,
        step: usize,
        op: O,
        run: &(dyn Fn(usize, O) -> Result<()> + Sync),
    ) -> Result<()> {
        if self.pool.threads() == 1 {
            return run(0, op);
        }
        let (n, bytes) = op.rows()?;
        if self.worth(bytes) == 1 || n <= step {
            return run(0, op);
        }
        // SAFETY: `parts` makes parts that do not overlap.
        self.parts((n, step, bytes), &|thread, rows| run(thread, unsafe { op.part(&rows, n) }))
    }
    /// Runs an elementwise operation in parts: which elements, and the result's.
    fn elements(&self, x: &ViewMut, run: &(dyn Fn(Range<usize>, ViewMut) -> Result<()> + Sync)) -> Result<()> {
        // SAFETY: `parts` makes parts that do not overlap.
        self.parts((x.len(), LINE, x.bytes()), &|_, part| run(part.clone(), unsafe { x.part(part) }))
    }
    /// Runs attention for parts of the key/value heads.
    fn heads(&self, n: usize, bytes: usize, run: &(dyn Fn(&mut AttentionScratch, Range<usize>) + Sync)) -> Result<()> {
        self.parts((n, 1, bytes), &|thread, heads| {
            run(&mut lock(&self.attention[thread]), heads);
            Ok(())
        })
    }
    /// Runs `run(thread, row, logits, loss)` for each of `n` rows, and adds the losses in row order.
    fn row_losses(
        &self,
        n: usize,
        logits: ViewMut,
        loss: ViewMut,
        run: &(dyn Fn(usize, usize, ViewMut, ViewMut) -> Result<()> + Sync),
    ) -> Result<()> {
        let mut held = lock(&self.losses);
        let losses = match held.take().filter(|losses| losses.len() >= n) {
            Some(losses) => losses,
            None => memory::alloc(DType::F64, n, Meter::default().lease(Category::Scratch, 0))?,
        };
        let losses = held.insert(losses).view_mut().slice(0..n);
        let width = logits.len() / n;
        self.parts((n, 1, logits.bytes()), &|thread, mut rows| {
            rows.try_for_each(|row| {
                // SAFETY: `parts` makes parts that do not overlap.
                let (logits, mut loss) =
                    unsafe { (logits.part(row * width..(row + 1) * width), losses.part(row..row + 1)) };
                memory::zero(loss.reborrow())?;
                run(thread, row, logits, loss)
            })
        })?;
        let sum = &mut loss.host::<f64>(CrossEntropy::OP)?[0];
        losses.host::<f64>(CrossEntropy::OP)?.iter().for_each(|loss| *sum += loss);
        Ok(())
    }
}

/// Where threads touch pages.
#[derive(Clone, Copy)]
struct BufferStart(*mut u8);
// SAFETY: threads touch disjoint parts.
unsafe impl Sync for BufferStart {}
impl BufferStart {
    fn get(&self) -> *mut u8 {
        self.0
    }
}

/// Ignores poisoning: scratch holds nothing between calls, so a panic leaves no invalid state.
fn lock<T>(scratch: &Mutex<T>) -> MutexGuard<'_, T> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `$call` with the type `$T` of an operand. Families check their operands, and thereby that the type is
/// supported.
macro_rules! types {
    ($dtype:expr, $T:ident => $call:expr) => {
        match $dtype {
            DType::Bf16 => types!(@run $T = bf16, $call),
            DType::F16 => types!(@run $T = f16, $call),
            _ => types!(@run $T = f32, $call),
        }
    };
    (@run $T:ident = $type:ty, $call:expr) => {{
        type $T = $type;
        $call
    }};
}

/// As [`types`], at the device's level.
macro_rules! floats {
    ($dev:ident, $dtype:expr, $T:ident => $call:expr) => {
        types!($dtype, $T => $dev.level.run(
            #[inline(always)]
            || $call,
        ))
    };
}

impl Device for CpuDevice {
    fn name(&self) -> String {
        let kernel = lock(&self.gemm[0]).kernel_name();
        match self.pool.threads() {
            1 => format!("cpu ({}, {kernel})", self.level),
            threads => format!("cpu ({}, {kernel}, {threads} threads)", self.level),
        }
    }
    fn meter(&self) -> &Meter {
        &self.meter
    }
    fn alloc(&self, dtype: DType, len: usize, category: Category) -> Result<Buf> {
        let lease = self.meter.lease_of(category, dtype, len, len * dtype.size());
        match self.is_unbacked() {
            true => unbacked::alloc(dtype, len, lease),
            false => self.touched(memory::alloc(dtype, len, lease)?),
        }
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buf> {
        let lease = self.meter.lease_of(Category::Host, dtype, len, len * dtype.size());
        match self.is_unbacked() {
            true => unbacked::alloc_host(dtype, len, lease),
            false => self.touched(memory::alloc_at(Place::Mapped, dtype, len, lease)?),
        }
    }
    fn is_unbacked(&self) -> bool {
        self.unbacked.is_some()
    }
    fn host_threads(&self) -> usize {
        self.pool.threads()
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn upload(&self, src: &[u8], dst: ViewMut) -> Result<()> {
        if self.is_unbacked() { Ok(()) } else { memory::upload(src, dst) }
    }
    fn download(&self, src: View, dst: &mut [u8]) -> Result<()> {
        memory::download(src, dst)
    }

    fn copy(&self, src: View, dst: ViewMut) -> Result<()> {
        length("copy", "dst", dst.len(), src.len())?;
        self.elements(&dst, &|part, dst| {
            let src = src.slice(part);
            match src.dtype() {
                dtype if dtype == dst.dtype() => memory::copy(src, dst),
                DType::F32 => floats!(self, dst.dtype(), T => element::cast::<f32, T>(src, dst)),
                dtype => floats!(self, dtype, T => element::cast::<T, f32>(src, dst)),
            }
        })
    }
    fn zero(&self, x: ViewMut) -> Result<()> {
        self.elements(&x, &|_, x| memory::zero(x))
    }
    fn add(&self, x: View, y: ViewMut) -> Result<()> {
        length("add", "y", y.len(), x.len())?;
        self.elements(&y, &|part, y| {
            let x = x.slice(part);
            match x.dtype() == y.dtype() {
                true => floats!(self, x.dtype(), T => element::add::<T, T>(x, y)),
                false => floats!(self, x.dtype(), T => element::add::<T, f32>(x, y)),
            }
        })
    }
    fn scale(&self, factor: f32, x: ViewMut) -> Result<()> {
        self.elements(&x, &|_, x| floats!(self, x.dtype(), T => element::scale::<T>(factor, x)))
    }

    fn gemm(&self, op: Gemm) -> Result<()> {
        let step = if op.shape.m == 1 { LINE } else { lock(&self.gemm[0]).kernel().panel() };
        self.rows_on(step, op, &|thread, op| gemm::gemm(&mut lock(&self.gemm[thread]), op))
    }
    fn gemm_then(&self, op: GemmThen) -> Result<()> {
        let (fuses, step) = {
            let scratch = lock(&self.gemm[0]);
            (scratch.fuses(&op.shape), scratch.kernel().panel())
        };
        match fuses {
            true => self.rows_on(step, op, &|thread, op| gemm::gemm_then(&mut lock(&self.gemm[thread]), op)),
            false => epilogue::in_passes(self, op),
        }
    }
    fn bias(&self, op: Bias) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.y.dtype(), T => norm::bias::<T>(op)))
    }
    fn bias_backward(&self, op: BiasBackward) -> Result<()> {
        op.check()?;
        self.parts((op.db.len(), LINE, op.dy.bytes()), &|_, columns| {
            // SAFETY: `parts` makes parts that do not overlap.
            let db = unsafe { op.db.part(columns.clone()) };
            floats!(self, op.dy.dtype(), T => norm::bias_backward::<T>(&op, columns.start, db))
        })
    }

    fn rmsnorm(&self, op: RmsNorm) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::rmsnorm::<T>(op)))
    }
    fn rmsnorm_backward(&self, op: RmsNormBackward) -> Result<()> {
        if self.worth(op.x.bytes()) == 1 {
            return floats!(self, op.x.dtype(), T => norm::rmsnorm_backward::<T, true>(op));
        }
        op.check()?;
        self.parts((op.dw.len(), LINE, op.x.bytes()), &|_, columns| {
            // SAFETY: `parts` makes parts that do not overlap.
            let dw = unsafe { op.dw.part(columns.clone()) };
            floats!(self, op.x.dtype(), T => norm::rmsnorm_weights::<T>(&op, columns.start, dw))
        })?;
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::rmsnorm_backward::<T, false>(op)))
    }
    fn layernorm(&self, op: LayerNorm) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::layernorm::<T>(op)))
    }
    fn layernorm_backward(&self, op: LayerNormBackward) -> Result<()> {
        if self.worth(op.x.bytes()) == 1 {
            return floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T, true>(op));
        }
        op.check()?;
        self.parts((op.dw.len(), LINE, op.x.bytes()), &|_, columns| {
            // SAFETY: as above.
            let of = [&op.dw, &op.db].map(|x| unsafe { x.part(columns.clone()) });
            floats!(self, op.x.dtype(), T => norm::layernorm_weights::<T>(&op, columns.start, of))
        })?;
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => norm::layernorm_backward::<T, false>(op)))
    }

    fn rope(&self, op: Rope) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.qkv.dtype(), T => rope::rope::<T>(op)))
    }
    fn qk_norm_rope(&self, op: QkNormRope) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope::<T>(op)))
    }
    fn qk_norm_rope_backward(&self, op: QkNormRopeBackward) -> Result<()> {
        if self.worth(op.qkv.bytes()) == 1 {
            return floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_backward::<T, true>(op));
        }
        op.check()?;
        let half = op.shape.head_dim / 2;
        self.parts((half, LINE / 4, op.qkv.bytes()), &|_, columns| {
            let second = half + columns.start..half + columns.end;
            let of = [(&op.dwq, &columns), (&op.dwq, &second), (&op.dwk, &columns), (&op.dwk, &second)];
            // SAFETY: as above, in either half.
            let of = of.map(|(x, columns)| unsafe { x.part(columns.clone()) });
            floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_weights::<T>(&op, columns.start, of))
        })?;
        self.rows(op, &|op| floats!(self, op.qkv.dtype(), T => rope::qk_norm_rope_backward::<T, false>(op)))
    }

    fn attention(&self, op: Attention) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = attention::WholeForward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn attention_sums(&self, shape: &AttentionShape, dtype: DType, queries: usize) -> usize {
        self.unbacked.map_or(0, |sums| sums(shape, dtype, queries))
    }
    fn attention_backward(&self, op: AttentionBackward) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = attention::WholeBackward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn attention_ranges(&self, op: AttentionRanges) -> Result<()> {
        ring::ranges(op)
    }
    fn attention_pass(&self, op: AttentionPass) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = ring::PassForward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn attention_merge(&self, op: AttentionMerge) -> Result<()> {
        ring::merge(op)
    }
    fn attention_delta(&self, op: AttentionDelta) -> Result<()> {
        floats!(self, op.o.dtype(), T => attention::delta::<T>(op))
    }
    fn attention_pass_backward(&self, op: AttentionPassBackward) -> Result<()> {
        let (heads, bytes) = (op.shape.kv_heads, op.qkv.bytes());
        types!(op.qkv.dtype(), T => {
            let pass = ring::PassBackward::<T>::new(op)?;
            // SAFETY: `heads` makes parts that do not overlap.
            self.heads(heads, bytes, &|scratch, heads| unsafe { pass.heads(self.level, scratch, heads) })
        })
    }
    fn copy_columns(&self, op: CopyColumns) -> Result<()> {
        self.rows(op, &|op| {
            floats!(self, op.src.dtype(), S => floats!(self, op.dst.dtype(), D => ring::copy_columns::<S, D>(op)))
        })
    }

    fn swiglu(&self, op: Glu) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::swiglu::<T>(op)))
    }
    fn swiglu_backward(&self, op: GluBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::swiglu_backward::<T>(op)))
    }
    fn geglu(&self, op: Glu) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::geglu::<T>(op)))
    }
    fn geglu_backward(&self, op: GluBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.gate.dtype(), T => activation::geglu_backward::<T>(op)))
    }
    fn gelu(&self, op: Gelu) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => activation::gelu::<T>(op)))
    }
    fn gelu_backward(&self, op: GeluBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.x.dtype(), T => activation::gelu_backward::<T>(op)))
    }
    fn dropout(&self, op: Dropout) -> Result<()> {
        let key = dropout::key(&op)?;
        let Dropout { p, key: words, x } = op;
        self.elements(&x, &|part, x| {
            let op = Dropout { p, key: words, x };
            floats!(self, op.x.dtype(), T => dropout::dropout::<T>(op, key, part.start))
        })
    }
    fn dropout_rows(&self, op: DropoutRows) -> Result<()> {
        let key = dropout::rows_key(&op)?;
        let n = op.check()?;
        self.parts((n, 1, op.x.bytes()), &|_, rows| {
            // SAFETY: `parts` makes parts that do not overlap.
            let part = unsafe { op.part(&rows, n.max(1)) };
            floats!(self, op.x.dtype(), T => dropout::dropout_rows::<T>(part, key, rows.start))
        })
    }

    fn embed(&self, op: Embed) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.w.dtype(), T => embed::embed::<T>(op)))
    }
    fn embed_backward(&self, op: EmbedBackward) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.dy.dtype(), T => embed::embed_backward::<T>(op)))
    }
    fn cross_entropy(&self, op: CrossEntropy) -> Result<()> {
        if self.worth(op.logits.bytes()) == 1 {
            let scratch = &mut lock(&self.gemm[0]);
            return floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op, scratch));
        }
        let (n, CrossEntropy { shape, targets, scale, logits, loss }) = (op.check()?, op);
        loss::check(CrossEntropy::OP, targets.host(CrossEntropy::OP)?, shape.vocab)?;
        self.row_losses(n, logits, loss, &|thread, row, logits, loss| {
            let op = CrossEntropy { shape, targets: targets.slice(row..row + 1), scale, logits, loss };
            let scratch = &mut lock(&self.gemm[thread]);
            floats!(self, op.logits.dtype(), T => loss::cross_entropy::<T>(op, scratch))
        })
    }
    fn cross_entropy_part(&self, op: CrossEntropyPart) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.logits.dtype(), T => loss::part::<T>(op)))
    }
    fn cross_entropy_finish(&self, op: CrossEntropyFinish) -> Result<()> {
        floats!(self, op.logits.dtype(), T => loss::finish::<T>(op))
    }

    fn sum_squares(&self, op: SumSquares) -> Result<()> {
        op.check()?;
        let (x, acc) = (op.x.host::<f32>(SumSquares::OP)?, Mutex::new(op.acc.host::<f64>(SumSquares::OP)?));
        self.parts((x.len(), ALIGN, op.x.bytes()), &|_, part| {
            let mut own = [0.0; LIMBS];
            self.level.run(
                #[inline(always)]
                || reduce::sum_squares(&x[part], &mut own),
            );
            reduce::merge(&own, &mut lock(&acc));
            Ok(())
        })
    }
    fn clip_scale(&self, op: ClipScale) -> Result<()> {
        reduce::clip_scale(op)
    }
    fn adamw(&self, op: AdamW) -> Result<()> {
        self.rows(
            op,
            &|op| floats!(self, op.out.as_ref().map_or(DType::F32, ViewMut::dtype), T => optim::adamw::<T>(op)),
        )
    }
    fn sgd(&self, op: Sgd) -> Result<()> {
        self.rows(op, &|op| floats!(self, op.out.as_ref().map_or(DType::F32, ViewMut::dtype), T => optim::sgd::<T>(op)))
    }
}

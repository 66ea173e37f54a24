//! Launches kernels on a stream: packs arguments as the driver reads them, and remembers recent kernels for fault
//! messages. Never waits.
use super::device::Cuda;
use super::{failure, maps};
use crate::gpu::driver::{Arg, Kernel, LaunchShape};
use crate::gpu::element;
use crate::{View, ViewMut};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaStream, result};
use flatshard_base::{Error, Result};
use std::ffi::c_void;

/// Maximum parameters of a kernel.
const PARAMETERS: usize = 32;

impl Cuda {
    /// `y (+)= x` on the caller's stream: same dtype, or y f32.
    pub fn take_on(&self, stream: &CudaStream, x: View, mut y: ViewMut, add: bool) -> Result<()> {
        let (n, block, vector) = (x.len(), 256u32, 16 / y.dtype().size());
        if n == 0 {
            return Ok(());
        }
        let ctas = n.div_ceil(block as usize * vector).min(8 * self.multiprocessors as usize) as u32;
        let (from, to) = (x.dtype(), y.dtype());
        let (kernel, y) = match add {
            true => (Kernel { variant: element::adds(from, to)?, entry: "add" }, Arg::InOut(y.reborrow())),
            false => (Kernel { variant: element::casts(from, to)?, entry: "cast" }, Arg::Out(y.reborrow())),
        };
        self.launch_on(stream, kernel, LaunchShape::line(ctas, block), &mut [Arg::In(x), y, Arg::U64(n as u64)])
    }
    /// Names of the most recent kernels, newest first.
    pub(super) fn recent(&self) -> String {
        let newest = self.recent.since(0).into_iter().rev();
        let names: Vec<&str> = newest.filter_map(|index| self.modules.names.get(index)).map(|k| k.variant).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }

    pub(super) fn launch_on(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        shape: LaunchShape,
        args: &mut [Arg],
    ) -> Result<()> {
        let Some(function) = self.modules.get(&kernel) else {
            return Err(Error::op(
                kernel.entry,
                format!(
                    "{}: kernel variant {} is not in this build, or not for sm_{}",
                    self.name, kernel.variant, self.arch
                ),
            ));
        };
        let mut words = [0u64; PARAMETERS];
        let count = pack(kernel.entry, args, &mut words)?;
        let mut maps = maps::encode(kernel.entry, args)?;
        let mut pointers = words.each_mut().map(|word| (&raw mut *word).cast::<c_void>());
        let places = pointers.iter_mut().zip(args.iter()).filter(|(_, arg)| matches!(arg, Arg::Map(_)));
        places.zip(&mut maps).for_each(|((place, _), map)| *place = (&raw mut *map).cast());
        self.recent.note(function.index);
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        self.context.bind_to_thread().map_err(|e| self.failed(kernel.variant, e))?;
        // SAFETY: a function of a loaded module; one pointer per parameter (the launch layer names them all, and in CI
        // the emulator checks every kernel's list against its text). Operands outlive the work, since memory is freed
        // only after the GPU is done with it.
        let launched = unsafe {
            result::launch_kernel(
                function.handle,
                (gx, gy, gz),
                (bx, by, bz),
                shape.shared,
                stream.cu_stream(),
                &mut pointers[..count],
            )
        };
        launched.map_err(|e| match failure::code(e) {
            CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => Error::op(
                kernel.entry,
                format!(
                    "{}: cannot launch variant {} as {shape:?} ({})",
                    self.name,
                    kernel.variant,
                    failure::name(e.0)
                ),
            ),
            _ => self.failed(kernel.variant, e),
        })
    }
}

/// Packs each argument into a word, in the kernel's order. Returns their number.
fn pack(op: &'static str, args: &mut [Arg], words: &mut [u64; PARAMETERS]) -> Result<usize> {
    if args.len() > PARAMETERS {
        return Err(Error::op(op, format!("{} arguments, at most {PARAMETERS}", args.len())));
    }
    for (word, arg) in words.iter_mut().zip(args.iter_mut()) {
        *word = match arg {
            Arg::In(view) => view.as_ptr() as u64,
            Arg::InOut(view) | Arg::Out(view) => view.as_mut_ptr() as u64,
            Arg::Null => 0,
            // The driver reads four bytes: the low ones, since every GPU host is little-endian.
            Arg::U32(x) => u64::from(*x),
            Arg::F32(x) => u64::from(x.to_bits()),
            Arg::U64(x) => *x,
            // Larger than a word: see maps.rs.
            Arg::Map(_) => 0,
        };
    }
    Ok(args.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_packed_in_order_and_their_number_is_bounded() {
        let mut words = [9; PARAMETERS];
        let mut args = [Arg::Null, Arg::U32(7), Arg::U64(1 << 40), Arg::F32(1.0)];
        assert_eq!(pack("test", &mut args, &mut words).unwrap(), 4);
        assert_eq!(words[..5], [0, 7, 1 << 40, 0x3f80_0000, 9]);
        let mut many: Vec<Arg> = (0..=PARAMETERS as u32).map(Arg::U32).collect();
        assert!(pack("test", &mut many, &mut words).unwrap_err().to_string().contains("33 arguments"));
    }
}

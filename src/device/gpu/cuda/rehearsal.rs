//! A driver that executes nothing and notes the matrix products it is asked for, as this GPU would compute them: what
//! is fused with a product is the library's decision. Never touches memory: its buffers are addresses.
use super::device::Cuda;
use super::operands::{Operands, Then};
use super::tune::WantedProduct;
use crate::gpu::calls::Calls;
use crate::gpu::driver::{Arg, Driver, Graph, Kernel, LaunchShape, ScaledGemm};
use crate::ops::{Gemm, GemmShape, GemmThen};
use crate::{Buf, View, ViewMut, unbacked};
use flatshard_base::meter::Lease;
use flatshard_base::{Category, DType, Error, Result};
use std::sync::{Arc, Mutex, PoisonError};

pub struct Rehearsal {
    cuda: Arc<Cuda>,
    wanted: Mutex<Vec<WantedProduct>>,
}

impl Rehearsal {
    pub fn new(cuda: Arc<Cuda>) -> Rehearsal {
        Rehearsal { cuda, wanted: Mutex::default() }
    }
    /// The product of each call so far.
    pub fn products(&self) -> Vec<WantedProduct> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    fn note(&self, shape: GemmShape, operands: Operands) -> Result<()> {
        if shape.k > 0 {
            self.wanted.lock().unwrap_or_else(PoisonError::into_inner).push(WantedProduct { shape, operands });
        }
        Ok(())
    }
    fn refused<T>(&self, what: &'static str) -> Result<T> {
        Err(Error::op(what, "a rehearsal captures no graphs"))
    }
}

impl Driver for Rehearsal {
    fn name(&self) -> String {
        format!("rehearsal of {}", self.cuda.name())
    }
    fn arch(&self) -> u32 {
        self.cuda.arch()
    }
    fn multiprocessors(&self) -> u32 {
        self.cuda.multiprocessors()
    }
    fn avoids(&self, variant: &str) -> bool {
        self.cuda.avoids(variant)
    }
    fn alloc(&self, dtype: DType, len: usize, _: Category, lease: Lease) -> Result<Buf> {
        unbacked::alloc(dtype, len, lease)
    }
    fn alloc_host(&self, dtype: DType, len: usize, lease: Lease) -> Result<Buf> {
        unbacked::alloc_host(dtype, len, lease)
    }
    fn upload(&self, _: &[u8], _: ViewMut) -> Result<()> {
        Ok(())
    }
    /// Zeros: no fault, and a finite norm.
    fn download(&self, parts: &mut [(View, &mut [u8])]) -> Result<()> {
        parts.iter_mut().for_each(|(_, to)| to.fill(0));
        Ok(())
    }
    fn copy(&self, _: View, _: ViewMut) -> Result<()> {
        Ok(())
    }
    fn zero(&self, _: ViewMut) -> Result<()> {
        Ok(())
    }
    fn launch(&self, _: Kernel, _: LaunchShape, _: &mut [Arg]) -> Result<()> {
        Ok(())
    }
    fn gemm(&self, Gemm { shape, a, b, c }: Gemm) -> Result<()> {
        self.note(shape, Operands::of(a, b, &c, Then::default()))
    }
    fn fuses(&self, op: &GemmThen) -> Result<bool> {
        self.cuda.fuses(op)
    }
    fn gemm_then(&self, GemmThen { shape, a, b, c, then }: GemmThen) -> Result<()> {
        self.note(shape, Operands::of(a, b, &c, Then::of(&then)))
    }
    fn multiplies_fp8(&self) -> bool {
        self.cuda.multiplies_fp8()
    }
    fn fuses_scaled(&self, op: &ScaledGemm) -> Result<bool> {
        self.cuda.fuses_scaled(op)
    }
    fn scaled_gemm(&self, op: ScaledGemm) -> Result<()> {
        self.note(op.shape, Operands::of_scaled(&op))
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn capture(&self, _: Calls) -> Result<Graph> {
        self.refused("capture")
    }
    fn replay(&self, _: &mut Graph) -> Result<()> {
        self.refused("replay")
    }
}

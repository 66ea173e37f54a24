//! One collective: four ranks (threads of this process) start an all-reduce, compute something else, and wait for the
//! sum.
//!
//! ```sh
//! cargo run --release --example one_collective
//! ```
use flatshard::base::{Category, DType, Result};
use flatshard::comm::{Axis, CommUse, MeshSizes, Reduce, Tag, run_ranks};
use flatshard::device::Device;
use flatshard::device::cpu::CpuDevice;

fn main() -> Result<()> {
    let sums = run_ranks(MeshSizes::sharded(4), |mesh, meter| {
        let (dev, group) = (CpuDevice::new(meter), mesh.group(Axis::World));
        // Groups allocate communication buffers, which other ranks read in place.
        let mut buf = group.alloc(DType::F32, 3, CommUse::Reduced, Category::Other)?;
        let own = [1.0, mesh.rank() as f32, 0.1];
        dev.upload(bytemuck::cast_slice(&own), buf.view_mut())?;

        let ticket = group.all_reduce(Tag::new("example", 0), buf.view_mut(), Reduce::Sum)?;
        let meanwhile: u64 = (0..1000).sum();
        group.wait(ticket)?;

        let mut sum = [0f32; 3];
        dev.download(buf.view(), bytemuck::cast_slice_mut(&mut sum))?;
        Ok((sum, meanwhile, group.stats().bytes))
    })?;
    for (rank, (sum, meanwhile, bytes)) in sums.iter().enumerate() {
        println!("rank {rank}: sum {sum:?}, {bytes} bytes received, meanwhile {meanwhile}");
    }
    // Sums are in rank order: the same bits on every rank, and in this loop.
    let tenths = (0..4).fold(0f32, |sum, _| sum + 0.1);
    assert!(sums.iter().all(|(sum, ..)| *sum == [4.0, 6.0, tenths]));
    Ok(())
}

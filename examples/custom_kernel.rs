//! A custom kernel in PTX: expanded, run on the simulated GPU (no driver, no toolkit), and compared with a loop in
//! Rust; then run once more with a bug, which the simulated GPU reports.
//!
//! ```sh
//! cargo run --release --example custom_kernel
//! ```
use flatshard::base::{Error, Result};
use flatshard_ptx::emulate::{Argument, GlobalMemory, KernelLaunch, parse};
use flatshard_ptx::expand::expand;

/// y = a x + y, V elements per thread. `.const`, `.for` and `V!`-like macros belong to the expander, the rest is PTX.
const SAXPY: &str = "
.version 8.0
.target sm_80
.address_size 64
.const V = 4

.visible .entry saxpy(.param .f32 p_a, .param .u64 p_x, .param .u64 p_y, .param .u32 p_n)
.maxntid 128, 1, 1
{
    .reg .u64  %x, %y, %offset;
    .reg .u32  %i, %n, %cta, %threads, %thread;
    .reg .f32  %a, %e<2>;
    .reg .pred %out;
    ld.param.f32 %a, [p_a];
    ld.param.u64 %x, [p_x];
    ld.param.u64 %y, [p_y];
    ld.param.u32 %n, [p_n];
    mov.u32 %cta, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %cta, %threads, %thread;
    mul.lo.u32 %i, %i, ${V};
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %y, %y, %offset;
    .for k in 0 .. V {
        setp.ge.u32 %out, %i, %n;
        @%out ret;
        ld.global.f32 %e[0], [%x + ${4 * k}];
        ld.global.f32 %e[1], [%y + ${4 * k}];
        fma.rn.f32 %e[1], %a, %e[0], %e[1];
        st.global.f32 [%y + ${4 * k}], %e[1];
        add.u32 %i, %i, 1;
    }
    ret;
}
";

/// The kernel's y for `n` elements, or the fault the simulated GPU found.
fn run(source: &str, a: f32, x: &[f32], y: &[f32]) -> Result<Vec<f32>> {
    let failed = |what: String| Error::op("saxpy", what);
    let plain = expand("saxpy.ptx", source, &[], &|_| None).map_err(|e| failed(e.to_string()))?;
    let kernels = parse("saxpy.ptx", &plain).map_err(|e| failed(e.to_string()))?;
    let mut memory = GlobalMemory::new();
    let x_at = memory.upload("x", bytemuck::cast_slice(x));
    let y_at = memory.upload("y", bytemuck::cast_slice(y));
    let n = x.len() as u32;
    let arguments = [Argument::F32(a), Argument::Pointer(x_at), Argument::Pointer(y_at), Argument::U32(n)];
    let (grid, block) = ([n.div_ceil(4 * 128), 1, 1], [128, 1, 1]);
    let launch =
        KernelLaunch { kernel: &kernels[0], grid, block, dynamic_shared: 0, arguments: &arguments, schedule: 1 };
    let counts = launch.run(&mut memory).map_err(|report| failed(report.to_string()))?;
    println!("{n} elements: {} instructions, {} sectors of memory", counts.instructions, counts.global_sectors);
    let bytes = memory.download(y_at).map_err(|e| failed(e.to_string()))?;
    Ok(bytemuck::pod_collect_to_vec(bytes))
}

fn main() -> Result<()> {
    let x: Vec<f32> = (0..1003).map(|i| i as f32 * 0.5).collect();
    let y: Vec<f32> = (0..1003).map(|i| 100.0 - i as f32).collect();
    let expected: Vec<f32> = x.iter().zip(&y).map(|(&x, &y)| 0.3f32.mul_add(x, y)).collect();
    assert_eq!(run(SAXPY, 0.3, &x, &y)?, expected);
    println!("equal to the loop in Rust, bit for bit");

    // Without the bounds check the last thread reads past x.
    match run(&SAXPY.replace("@%out ret;", ""), 0.3, &x, &y) {
        Err(found) => println!("without the bounds check: {found}"),
        Ok(_) => return Err(Error::op("saxpy", "the simulated GPU found nothing")),
    }
    Ok(())
}

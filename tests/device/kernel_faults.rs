//! The simulated GPU as a device: a kernel's fault becomes an error that says where it happened.
use flatshard::base::{Category, DType, Meter, Result};
use flatshard::device::gpu::GpuDevice;
use flatshard::device::gpu::sim::Sim;
use flatshard::device::ops::Gelu;
use flatshard::device::{Buf, Device};
use std::sync::Arc;

/// y += x with one thread per element, and the bug in `body`, instead of the real kernel.
fn planted(body: &str) -> GpuDevice {
    let text = format!(
        "# 1 \"add.ptx\"
.version 8.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 p_x, .param .u64 p_y, .param .u64 p_n)
.maxntid 256, 1, 1
{{
    .reg .u64 %x, %y, %n, %i, %at;
    .reg .u32 %thread;
    .reg .f32 %a, %b;
    .reg .pred %out;
    ld.param.u64 %x, [p_x];
    ld.param.u64 %y, [p_y];
    ld.param.u64 %n, [p_n];
    mov.u32 %thread, %tid.x;
    cvt.u64.u32 %i, %thread;
    setp.ge.u64 %out, %i, %n;
    shl.b64 %at, %i, 2;
    add.u64 %x, %x, %at;
    add.u64 %y, %y, %at;
    {body}
    ret;
}}
"
    );
    let sim = Sim::new().replace("add_f32", "add.ptx", &text).unwrap();
    GpuDevice::new(Arc::new(sim), Meter::default()).unwrap()
}
fn floats(dev: &dyn Device, values: &[f32]) -> Buf {
    let mut buf = dev.alloc(DType::F32, values.len(), Category::Other).unwrap();
    dev.upload(bytemuck::cast_slice(values), buf.view_mut()).unwrap();
    buf
}
fn read(dev: &dyn Device, buf: &Buf) -> Vec<f32> {
    let mut values = vec![0.0f32; buf.len()];
    dev.download(buf.view(), bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}
/// The result of 100 additions, and the values of y.
fn add(dev: &GpuDevice) -> (Result<()>, Vec<f32>) {
    let (x, mut y) = (floats(dev, &[1.0; 104]), floats(dev, &[2.0; 104]));
    let result = dev.add(x.view().slice(0..100), y.view_mut().slice(0..100));
    (result, read(dev, &y))
}
#[track_caller]
fn says(result: Result<()>, parts: &[&str]) {
    let error = result.unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "no {part:?} in: {error}");
    }
}

const ADD: &str =
    "@%out ret; ld.global.f32 %a, [%x]; ld.global.f32 %b, [%y]; add.rn.f32 %a, %a, %b; st.global.f32 [%y], %a;";

#[test]
fn a_correct_kernel_runs_on_its_operands_only() {
    let (result, y) = add(&planted(ADD));
    result.unwrap();
    assert!(y[..100].iter().all(|&y| y == 3.0) && y[100..].iter().all(|&y| y == 2.0), "{y:?}");
}

/// Beyond the operand, but within its buffer.
#[test]
fn out_of_bounds_names_device_kernel_line_thread_and_operand() {
    let (result, _) = add(&planted(&ADD.replace("@%out ret;", "")));
    says(
        result,
        &["add", "sim", "add_f32", "out of bounds", "add.ptx:", "cta 0 warp 3 lane 4", "'x'", "bytes 400..404"],
    );
}

#[test]
fn writing_a_read_only_operand_is_an_error() {
    let (result, _) = add(&planted(&ADD.replace("[%y], %a", "[%x], %a")));
    says(result, &["read only", "add.ptx:", "'x'"]);
}

#[test]
fn a_misaligned_access_is_an_error() {
    let (result, _) = add(&planted(&ADD.replace("[%x]", "[%x + 2]")));
    says(result, &["misaligned", "'x'"]);
}

#[test]
fn reading_an_uninitialized_register_is_an_error() {
    let (result, _) = add(&planted(&ADD.replace("ld.global.f32 %b, [%y];", "")));
    says(result, &["uninitialized", "%b"]);
}

/// Two threads of different warps write one element.
#[test]
fn a_race_is_an_error() {
    let shifted = "sub.u64 %at, %i, 32; setp.ge.u64 %out, %i, 64; @%out ret; setp.lt.u64 %out, %i, 32; \
                   @%out mov.u64 %at, %i; ld.param.u64 %y, [p_y]; shl.b64 %at, %at, 2; add.u64 %y, %y, %at; \
                   mov.f32 %a, 0f3F800000; st.global.f32 [%y], %a;";
    let (result, _) = add(&planted(shifted));
    says(result, &["race", "'y'", "warp 1"]);
}

/// `gelu` overwrites its output: an element it skips was never written, whatever the buffer contained.
#[test]
fn an_incomplete_output_is_an_error() {
    let text = "# 1 \"gelu.ptx\"
.version 8.0
.target sm_80
.address_size 64
.visible .entry gelu(.param .u64 p_x, .param .u64 p_y, .param .u64 p_n)
.maxntid 256, 1, 1
{
    .reg .u64 %y;
    .reg .f32 %a;
    ld.param.u64 %y, [p_y];
    mov.f32 %a, 0f00000000;
    st.global.f32 [%y], %a;
    ret;
}
";
    let sim = Sim::new().replace("gelu_f32", "gelu.ptx", text).unwrap();
    let dev = GpuDevice::new(Arc::new(sim), Meter::default()).unwrap();
    let (x, mut y) = (floats(&dev, &[1.0; 8]), floats(&dev, &[2.0; 8]));
    // 256 threads write one element: a race, unless only one does.
    says(dev.gelu(Gelu { x: x.view(), y: y.view_mut() }), &["race", "'y'"]);
    let text = text.replace(
        "    st.global",
        "    .reg .u32 %t; .reg .pred %p; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;\n    @%p st.global",
    );
    let sim = Sim::new().replace("gelu_f32", "gelu.ptx", &text).unwrap();
    let dev = GpuDevice::new(Arc::new(sim), Meter::default()).unwrap();
    says(dev.gelu(Gelu { x: x.view(), y: y.view_mut() }), &["gelu", "byte 4 of 'y' was never written"]);
}

/// Kernels move 16 bytes at a time if operands are aligned, and fewer if not.
#[test]
fn operands_may_start_anywhere() {
    let dev = GpuDevice::new(Arc::new(Sim::new()), Meter::default()).unwrap();
    let (x, mut y) = (floats(&dev, &[1.0; 41]), floats(&dev, &[2.0; 42]));
    dev.add(x.view().slice(1..41), y.view_mut().slice(2..42)).unwrap();
    assert_eq!(read(&dev, &y), [&[2.0; 2][..], &[3.0; 40]].concat());
}

#[test]
fn device_memory_matches_the_plan() {
    let (sim, meter) = (Sim::new(), Meter::default());
    let multiprocessors = flatshard::device::gpu::Driver::multiprocessors(&sim);
    let _dev = GpuDevice::new(Arc::new(sim), meter.clone()).unwrap();
    assert_eq!(meter.total(), GpuDevice::planned(multiprocessors));
    // 64 KiB per multiprocessor, and the limbs of eight blocks each.
    let [h100, b200] = [132, 148].map(GpuDevice::planned);
    assert_eq!(b200 - h100, 16 * (64 << 10) + 16 * 8 * 68 * 8);
}

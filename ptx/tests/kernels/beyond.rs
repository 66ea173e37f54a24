//! Buffers beyond 4 GiB and 2^32 elements, of which only the ends exist: elementwise and row kernels must compute
//! addresses in 64 bits. Never compares values: other tests do.
use super::harness::*;
use flatshard_ptx::emulate::{Argument, FindingKind, GlobalMemory, KernelLaunch, LaunchReport, parse};
use flatshard_ptx::kernels::Variant;
use std::ops::Range;

const HUGE: u64 = 1 << 32;

enum Operand {
    /// Elements that exist, with their value, or None if the kernel must fill them.
    Part(DType, Vec<Range<u64>>, Option<f64>),
    Plain(Argument),
}
use Operand::*;

fn holds(dtype: DType, there: Range<u64>, value: f64) -> Operand {
    Part(dtype, vec![there], Some(value))
}
fn fills(dtype: DType, there: Range<u64>) -> Operand {
    Part(dtype, vec![there], None)
}
fn plain(value: u64) -> Operand {
    Plain(Argument::U32(value as u32))
}
fn fraction(value: f32) -> Operand {
    Plain(Argument::F32(value))
}
/// The state without an index fault.
fn faultless() -> Operand {
    holds(U64, 0..1, 0.0)
}

struct Far<'a> {
    variant: &'a str,
    grid: [u32; 2],
    threads: u32,
    /// The CTAs of the grid to run.
    ctas: Vec<u32>,
    operands: Vec<Operand>,
}

impl Far<'_> {
    /// Runs with a changed text; outputs that exist must be filled.
    fn run(&self, change: impl Fn(String) -> String) -> Result<(), LaunchReport> {
        let Far { variant, grid: [x, y], threads, ctas, operands } = self;
        let found = Variant::by_name(variant).unwrap_or_else(|| panic!("no variant {variant}"));
        let kernels = parse(found.file, &change(found.expand().unwrap_or_else(|e| panic!("{e}")))).unwrap();
        let (mut memory, mut outputs, mut arguments) = (GlobalMemory::new(), vec![], vec![]);
        for operand in operands {
            let (dtype, there, value) = match operand {
                Plain(argument) => {
                    arguments.push(*argument);
                    continue;
                }
                Part(dtype, there, value) => (dtype, there, value),
            };
            let size = dtype.size() as u64;
            let bytes =
                |part: &Range<u64>| encode(&vec![value.unwrap_or(-1.0); (part.end - part.start) as usize], *dtype);
            let pieces = there.iter().map(|part| (part.start * size, bytes(part))).collect();
            let base = memory.sparse("operand", pieces, value.is_some());
            outputs.extend(there.iter().filter(|_| value.is_none()).map(|part| base + part.start * size));
            arguments.push(Argument::Pointer(base));
        }
        let (kernel, arguments) = (&kernels[0], &arguments[..]);
        let launch = KernelLaunch {
            kernel,
            grid: [*x, *y, 1],
            block: [*threads, 1, 1],
            dynamic_shared: 0,
            arguments,
            schedule: 0,
        };
        for &cta in ctas {
            launch.run_some(cta..cta + 1, &mut memory)?;
        }
        for output in outputs {
            memory.download(output).unwrap_or_else(|e| panic!("{variant}: {e}"));
        }
        Ok(())
    }
    fn check(&self) {
        self.run(|text| text).unwrap_or_else(|report| panic!("{}:\n{report}", self.variant));
    }
}

/// The first and the last CTA of an elementwise kernel, V at a time: more than 2^32 elements, not a multiple of V.
fn flat(variant: &str, v: u64, operands: Vec<(DType, Option<f64>)>, more: [Vec<Operand>; 2]) -> Far<'_> {
    let n = HUGE + 3 * 256 * v + 1;
    let ctas = (n / v).div_ceil(256) as u32;
    // The first CTA handles the remainder at the end.
    let there = vec![0..256 * v, (ctas as u64 - 1) * 256 * v..n];
    let mut operands: Vec<Operand> =
        operands.into_iter().map(|(dtype, value)| Part(dtype, there.clone(), value)).collect();
    let [before, after] = more;
    operands.extend(before);
    operands.push(Plain(Argument::U64(n)));
    operands.extend(after);
    Far { variant, grid: [ctas, 1], threads: 256, ctas: vec![0, ctas - 1], operands }
}

#[test]
fn elements_beyond_4_gib() {
    let (one, out) = (Some(1.0), None);
    for (dtype, name) in DTYPES {
        let v = 16 / dtype.size() as u64;
        let with = |kernel: &str, operands: &[Option<f64>], more: [Vec<Operand>; 2]| {
            let operands = operands.iter().map(|value| (dtype, *value)).collect();
            flat(&format!("{kernel}_{name}"), v, operands, more).check();
        };
        let of = |kernel: &str, operands: &[Option<f64>]| with(kernel, operands, [vec![], vec![]]);
        of("add", &[one, one]);
        of("gelu", &[one, out]);
        of("gelu_backward", &[one, one, out]);
        with("scale", &[one], [vec![], vec![fraction(0.5)]]);
        with("dropout", &[one], [vec![holds(U32, 0..2, 7.0)], vec![plain(1 << 30), fraction(2.0)]]);
        for unit in ["swiglu", "geglu"] {
            of(unit, &[one, one, out]);
            of(&format!("{unit}_backward"), &[one, one, one, out, out]);
        }
        if dtype != F32 {
            for (variant, v, operands) in [
                (format!("cast_f32_{name}"), 4, vec![(F32, one), (dtype, out)]),
                (format!("cast_{name}_f32"), 4, vec![(dtype, one), (F32, out)]),
                (format!("add_{name}_f32"), 4, vec![(dtype, one), (F32, one)]),
            ] {
                flat(&variant, v, operands, [vec![], vec![]]).check();
            }
        }
    }
    // Weights, optimizer state, and their copies for the next step.
    for (suffix, copy) in [("_f32", F32), ("_bf16", Bf16), ("_f16", F16)] {
        let state = |n: usize| [vec![(F32, one); n], vec![(copy, out)]].concat();
        let before = |n: u64| [vec![holds(F32, 0..n, 0.5), holds(F32, 0..2, 1.0)], vec![]];
        flat(&format!("adamw{suffix}"), 4, state(4), before(8)).check();
        flat(&format!("sgd_momentum{suffix}"), 4, state(3), before(3)).check();
    }
    let state = [vec![(F32, one)], vec![(Bf16, one); 3], vec![(Bf16, out)]].concat();
    let before = vec![holds(F32, 0..8, 0.5), holds(F32, 0..2, 1.0)];
    let place = [7, 5, 3, 30, 90].map(|x| Plain(Argument::U64(x))).into();
    flat("adamw_both_bf16", 4, state, [before, place]).check();
    // A warp handles 256 elements, 8 per lane.
    let state = [vec![(F32, one)], vec![(U8, one); 2], vec![(Bf16, one), (Bf16, out)]].concat();
    let largest = || Part(F32, vec![0..8, (HUGE >> 8) + 16..(HUGE >> 8) + 25], one);
    let before = vec![largest(), largest(), holds(F32, 0..1024, 0.5), holds(F32, 0..8, 0.5), holds(F32, 0..2, 1.0)];
    let place = [7, 5, 3, 30, 90].map(|x| Plain(Argument::U64(x))).into();
    flat("adamw_blocks_master_bf16", 8, state, [before, place]).check();
}

/// The last of more than 2^22 rows of 1024.
const ROWS: u64 = (HUGE >> 10) + 3;
const COLUMNS: u64 = 1024;
fn last(columns: u64) -> Range<u64> {
    (ROWS - 1) * columns..ROWS * columns
}
fn rows(variant: &str, operands: Vec<Operand>) -> Far<'_> {
    let ctas = ROWS as u32;
    Far { variant, grid: [ctas, 1], threads: 128, ctas: vec![ctas - 1], operands }
}

#[test]
fn rows_beyond_4_gib() {
    for (dtype, name) in DTYPES {
        let (x, weights) = (|| holds(dtype, last(COLUMNS), 1.0), || holds(dtype, 0..COLUMNS, 1.0));
        let (shape, of) = (|| [plain(ROWS), plain(COLUMNS)], |kernel: &str| format!("{kernel}_{name}"));
        for (kernel, layer) in [("rmsnorm", 0), ("layernorm", 1)] {
            let mut operands = vec![x(), weights()];
            operands.extend((layer == 1).then(weights));
            operands.extend([fills(dtype, last(COLUMNS)), fills(F32, last(1 + layer))]);
            operands.extend(shape());
            operands.push(fraction(1e-5));
            operands.extend((layer == 0).then(|| fraction(0.0)));
            rows(&of(kernel), operands).check();
            let mut operands = vec![x(), weights(), holds(F32, last(1 + layer), 1.0), x(), x()];
            // Each CTA's sums of the weights' gradients, then of the biases'.
            let sums = (0..1 + layer).map(|part| part * ROWS * COLUMNS + (ROWS - 1) * COLUMNS);
            operands.push(Part(F32, sums.map(|at| at..at + COLUMNS).collect(), None));
            operands.extend(shape());
            operands.extend((layer == 0).then(|| fraction(0.0)));
            rows(&of(&format!("{kernel}_backward")), operands).check();
        }
        let mut operands = vec![x(), holds(U32, 0..2, 7.0), holds(U32, last(1), 5.0), x()];
        operands.extend(shape());
        operands.extend([plain(0), plain(1 << 30), fraction(2.0), plain(1), plain(1)]);
        Far { threads: 256, ..rows(&of("dropout_rows"), operands) }.check();
        // The row of the table is equally far out.
        let token = (ROWS - 1) as f64;
        let mut operands = vec![holds(U32, last(1), token), x(), fills(dtype, last(COLUMNS)), faultless()];
        operands.extend(shape());
        operands.extend([fraction(1.0), plain(0), plain(0), plain(ROWS)]);
        rows(&of("embed"), operands).check();
        let taught = vec![holds(I32, last(1), 1.0), x(), x(), fills(F32, last(7)), faultless()];
        let numbers = vec![plain(0), fraction(30.0), fraction(30.0), fraction(0.5)];
        let operands = taught.into_iter().chain(shape()).chain(numbers).collect();
        rows(&of("distill_part"), operands).check();
        for cap in ["", "cap_"] {
            let given = || vec![holds(I32, last(1), 1.0)];
            let mut operands = given();
            operands.extend([x(), fills(F64, last(1)), faultless(), holds(F32, 0..1, 1.0)]);
            operands.extend(shape());
            operands.extend([fraction(30.0), plain(0)]);
            let whole = if cap.is_empty() { of("cross_entropy") } else { of("cross_entropy_cap") };
            rows(&whole, operands).check();
            let mut operands = given();
            operands.extend([x(), fills(F32, last(3)), faultless()]);
            operands.extend(shape());
            operands.extend([plain(0), fraction(30.0)]);
            rows(&of(&format!("cross_entropy_part_{cap}")).replace("__", "_"), operands).check();
        }
    }
}

/// Heads of the last of equally many rows: four of queries, two of keys and of values, 128 wide.
#[test]
fn heads_beyond_4_gib() {
    let (heads, kv_heads, d) = (4, 2, 128);
    let row = (heads + 2 * kv_heads) * d;
    for (dtype, name) in DTYPES {
        let first = || vec![holds(F32, 0..d, 0.5), holds(U32, last(1), 0.0)];
        let x = || holds(dtype, last(row), 1.0);
        for kernel in ["rope", "rope_adjacent"] {
            let mut operands = first();
            operands.extend([x(), faultless(), plain(ROWS), plain(heads + kv_heads), plain(d), plain(d), plain(row)]);
            operands.push(fraction(1.0));
            Far { threads: 32, ..rows(&format!("{kernel}_{name}"), operands) }.check();
        }
        let weights = || [holds(dtype, 0..d, 1.0), holds(dtype, 0..d, 1.0), x()];
        let shape = || [ROWS, heads, kv_heads, d].map(plain);
        let mut operands = first();
        operands.extend(weights());
        operands.extend([fills(dtype, last(row)), fills(F32, last(heads + kv_heads)), faultless()]);
        operands.extend(shape());
        operands.extend([fraction(1e-6), fraction(0.0)]);
        Far { threads: 32, ..rows(&format!("qk_norm_rope_{name}"), operands) }.check();
        let sums = [0, 1].map(|of| (of * ROWS + ROWS - 1) * d).map(|at| at..at + d).to_vec();
        let mut operands = first();
        operands.extend(weights());
        operands.extend([holds(F32, last(heads + kv_heads), 1.0), x(), Part(F32, sums, None), faultless()]);
        operands.extend(shape());
        operands.push(fraction(0.0));
        Far { threads: 32, ..rows(&format!("qk_norm_rope_backward_{name}"), operands) }.check();
    }
}

/// The last of equally many rows of experts: a warp each.
#[test]
fn rows_of_experts_beyond_4_gib() {
    for (dtype, name) in DTYPES {
        let x = || holds(dtype, last(COLUMNS), 1.0);
        let far = |variant: &str, operands| Far { threads: 32, ..rows(variant, operands) }.check();
        let last_row = || holds(U32, last(1), (ROWS - 1) as f64);
        let (weights, shape) = (|| holds(F32, last(1), 0.5), || [plain(ROWS), plain(COLUMNS)]);
        let mut operands = vec![last_row(), x(), fills(dtype, last(COLUMNS))];
        operands.extend(shape());
        operands.push(plain(1));
        far(if dtype == F32 { "take_rows_b32" } else { "take_rows_b16" }, operands);
        let mut operands = vec![last_row(), weights(), x(), fills(dtype, last(COLUMNS))];
        operands.extend(shape());
        operands.extend([1, 1, 1, 0].map(plain));
        far(&format!("combine_rows_{name}"), operands);
        let mut operands = vec![last_row(), weights(), x(), x(), fills(F32, last(1))];
        operands.extend(shape());
        operands.push(plain(1));
        far(&format!("weigh_rows_{name}"), operands);
    }
}

/// The last strip of rows of more than 2^30 columns.
#[test]
fn strips_beyond_4_gib() {
    for (dtype, name) in DTYPES {
        let wide = 32 * 16 / dtype.size() as u64;
        let strip = |wide: u64, rows: u64| -> (u64, Vec<Range<u64>>) {
            let columns = (1 << 30) + wide;
            (columns, (1..=rows).map(|row| row * columns - wide..row * columns).collect())
        };
        let far = |variant: &str, wide: u64, threads: u32, operands: Vec<Operand>| {
            let ctas = (strip(wide, 1).0 / wide) as u32;
            Far { variant, grid: [ctas, 1], threads, ctas: vec![ctas - 1], operands }.check();
        };
        let (columns, there) = strip(wide, 5);
        let of_x = || Part(dtype, there.clone(), Some(1.0));
        let shape = || [plain(5), plain(columns)];
        let mut operands = vec![holds(dtype, there[0].clone(), 1.0), of_x()];
        operands.extend(shape());
        far(&format!("bias_{name}"), wide, 256, operands);
        let mut operands = vec![of_x(), fills(F32, there[0].clone())];
        operands.extend(shape());
        far(&format!("bias_backward_{name}"), wide, 256, operands);
        if dtype == F32 {
            let (columns, there) = strip(32, 5);
            let sums = holds(F32, there[0].clone(), 1.0);
            far("sum_rows", 32, 1024, vec![Part(F32, there, Some(1.0)), sums, plain(5), plain(columns)]);
        }
    }
}

/// An address computed in 32 bits wraps to memory that does not exist.
#[test]
fn addresses_of_32_bits_are_found() {
    let found = |far: &Far, old: &str, new: &dyn Fn(&[&str]) -> String| {
        let change = |text: String| {
            let line =
                text.lines().rfind(|line| line.trim_start().starts_with(old)).unwrap_or_else(|| panic!("no {old}"));
            let operands: Vec<&str> =
                line.trim().trim_end_matches(';')[old.len()..].split(',').map(str::trim).collect();
            text.replacen(line, &new(&operands), 1)
        };
        let report = far.run(change).expect_err(far.variant);
        assert!(report.has(FindingKind::OutOfBounds), "{report}");
    };
    let one = Some(1.0);
    let add = flat("add_bf16", 8, vec![(Bf16, one), (Bf16, one)], [vec![], vec![]]);
    add.check();
    // The index of an element, and its byte offset.
    found(&add, "mad.lo.u64", &|o| {
        format!(
            "{{ .reg .u64 %cut; and.b64 %cut, {}, 0xffffffff; mad.lo.u64 {}, %cut, {}, {}; }}",
            o[1], o[0], o[2], o[3]
        )
    });
    found(&add, "mad.lo.u64", &|o| {
        let cut = format!("mul.lo.u64 %cut, {}, {}; and.b64 %cut, %cut, 0xffffffff;", o[1], o[2]);
        format!("{{ .reg .u64 %cut; {cut} add.u64 {}, %cut, {}; }}", o[0], o[3])
    });
    let operands = vec![
        holds(Bf16, last(COLUMNS), 1.0),
        holds(Bf16, 0..COLUMNS, 1.0),
        fills(Bf16, last(COLUMNS)),
        fills(F32, last(1)),
        plain(ROWS),
        plain(COLUMNS),
        fraction(1e-5),
        fraction(0.0),
    ];
    let norm = rows("rmsnorm_bf16", operands);
    norm.check();
    found(&norm, "mul.wide.u32            %offset", &|o| {
        format!("{{ .reg .u32 %cut; mul.lo.u32 %cut, {}, {}; cvt.u64.u32 %offset, %cut; }}", o[1], o[2])
    });
}

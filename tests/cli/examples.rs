//! The examples, as cargo builds them for this test: each checks itself, and prints what its head comment promises.
use std::process::Command;

/// The output of `name`.
fn run(name: &str) -> String {
    let beside = std::env::current_exe().unwrap();
    let program = beside.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(program.exists(), "{}: cargo test --workspace builds it", program.display());
    let out = Command::new(program).output().unwrap();
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn a_custom_main_trains() {
    let printed = run("train_in_process");
    let losses = printed.lines().filter_map(|line| line.split("loss ").nth(1)?.split(' ').next()?.parse::<f64>().ok());
    let losses: Vec<f64> = losses.collect();
    assert!(losses.len() == 6 && losses[5] < 0.6 * losses[0], "{printed}");
}

#[test]
fn a_custom_store_is_bitwise_equal_to_ddp() {
    let printed = run("custom_store");
    assert!(printed.contains("step 10") && printed.ends_with("bitwise equal\n"), "{printed}");
}

#[test]
fn one_collective_sums_on_every_rank() {
    let printed = run("one_collective");
    assert_eq!(printed.matches("sum [4.0, 6.0, 0.4]").count(), 4, "{printed}");
}

#[test]
fn a_custom_kernel_runs_and_its_fault_is_reported() {
    let printed = run("custom_kernel");
    assert!(printed.contains("bit for bit") && printed.contains("out of bounds: saxpy at saxpy.ptx:"), "{printed}");
}

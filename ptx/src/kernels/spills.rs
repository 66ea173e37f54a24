//! What releases of ptxas are known to spill, from `ptxas.txt`, which `scripts/ptxas_check.sh` keeps true. Never
//! assembles anything.

/// The most bytes per thread that a release of ptxas is known to spill in this variant.
pub fn known_spill(variant: &str) -> usize {
    let rows = include_str!("ptxas.txt").lines().filter(|line| !line.starts_with('#'));
    let bytes = |row: &str| match row.split(' ').collect::<Vec<_>>()[..] {
        [_release, _arch, kernel, bytes, "bytes", ..] if kernel == variant => bytes.parse().ok(),
        _ => None,
    };
    rows.filter_map(bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::known_spill;

    #[test]
    fn spills_are_those_of_the_table() {
        assert_eq!(known_spill("attention_dq_bf16_128"), 8);
        assert_eq!([known_spill("attention_hopper_backward_bf16_128"), known_spill("adamw")], [0, 0]);
    }
}

//! Whether a run fits into a GPU, checked before it allocates, and what holds the memory when it runs out. Never calls
//! the driver.
use flatshard_base::meter::REMEDY;
use flatshard_base::{Error, Meter, Result};

/// "12.34 GiB", "56.7 MiB", "890 bytes".
pub(super) fn amount(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{bytes} bytes"),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Fails with an input error unless `sharing` ranks of `planned` bytes each fit in free memory.
pub fn fits(name: &str, planned: usize, sharing: usize, free: usize, total: usize) -> Result<()> {
    let needed = planned.saturating_mul(sharing.max(1));
    if needed <= free {
        return Ok(());
    }
    let ranks = if sharing > 1 { format!(" ({sharing} ranks of {})", amount(planned)) } else { String::new() };
    Err(Error::input(format!(
        "{name}: this run needs {}{ranks} of GPU memory, but only {} of {} are free. Use `activation_checkpoint`, \
         `precision: bf16`, a smaller `batch_size` or `max_len`, more GPUs, or stop other processes on this one (nvidia-smi)",
        amount(needed),
        amount(free),
        amount(total),
    )))
}

pub(super) fn out_of_memory(name: &str, op: &str, (free, total): (usize, usize), meter: &Meter) -> Error {
    Error::Run(format!(
        "{name}: out of memory during {op}: {} of {} are free; {}. {REMEDY}",
        amount(free),
        amount(total),
        meter.dump()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flatshard_base::Category;

    #[test]
    fn too_little_memory_reports_planned_and_free_bytes_before_allocating() {
        fits("cuda:0", 10 << 30, 1, 10 << 30, 80 << 30).unwrap();
        let e = fits("cuda:0", 10 << 30, 2, 15 << 30, 80 << 30).unwrap_err();
        assert_eq!(e.exit_status(), 2);
        let text = e.to_string();
        assert!(
            text.contains("needs 20.00 GiB (2 ranks of 10.00 GiB)") && text.contains("15.00 GiB of 80.00 GiB"),
            "{text}"
        );
    }

    #[test]
    fn small_amounts_are_not_rounded_to_zero() {
        assert_eq!([37_888, 34 << 20, 80 << 30].map(amount), ["37888 bytes", "34.0 MiB", "80.00 GiB"]);
    }

    #[test]
    fn running_out_of_memory_lists_what_is_held_largest_first() {
        let meter = Meter::default();
        let _small = meter.lease(Category::Saved, 1 << 20);
        let _large = [meter.lease(Category::Slots, 3 << 20), meter.lease(Category::Slots, 3 << 20)];
        let e = out_of_memory("cuda:0 (H100)", "alloc", (1 << 30, 80 << 30), &meter);
        assert_eq!(e.exit_status(), 1);
        let text = e.to_string();
        let says = "1.00 GiB of 80.00 GiB are free; this rank holds 7.0 MiB in 3 buffers: slots 6.0 MiB, saved 1.0 MiB; largest \
                    first: 2 x 3.0 MiB slots (slots), 1 x 1.0 MiB saved (saved). Use ";
        assert!(text.contains(says), "{text}");
    }
}

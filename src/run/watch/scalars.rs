//! Names of metrics in TensorBoard and W&B: `scalars.tsv`, which also gives the source of each name. Never measures.
use serde_json::Value;

pub const TABLE: &str = include_str!("scalars.tsv");

pub struct Scalars {
    rows: Vec<Scalar>,
    ranks: f64,
}

struct Scalar {
    event: &'static str,
    /// A number of the event, or `record.number`.
    number: &'static str,
    name: &'static str,
    unit: &'static str,
}

impl Scalars {
    pub fn new(ranks: usize) -> Scalars {
        let rows = TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let mut words = line.split_whitespace();
            Some(Scalar { event: words.next()?, number: words.next()?, name: words.next()?, unit: words.next()? })
        });
        Scalars { rows: rows.collect(), ranks: ranks as f64 }
    }

    /// The numbers of an event under these names, without nulls.
    pub fn of<'s>(&'s self, event: &'s Value) -> impl Iterator<Item = (&'static str, f64)> + 's {
        self.rows.iter().filter(move |row| event["event"] == row.event).filter_map(move |row| {
            let value = row.number.split('.').fold(event, |record, key| &record[key]).as_f64()?;
            Some((
                row.name,
                match row.unit {
                    "%" => value * 100.0,
                    "GiB" => value / (1u64 << 30) as f64,
                    "/rank" => value / self.ranks,
                    _ => value,
                },
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::gpu::telemetry::Sample;
    use serde_json::json;
    use std::collections::BTreeSet;

    #[test]
    fn every_row_is_read_and_no_name_stands_twice() {
        let scalars = Scalars::new(2);
        assert_eq!(scalars.rows.len(), TABLE.lines().filter(|l| !l.starts_with('#')).count());
        let names: BTreeSet<_> = scalars.rows.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), scalars.rows.len());
        assert!(scalars.rows.iter().all(|row| ["1", "%", "GiB", "/rank"].contains(&row.unit)));
    }

    #[test]
    fn units_and_what_is_not_known() {
        let scalars = Scalars::new(4);
        let event = json!({"event": "step", "mfu": 0.25, "tokens_per_sec": 100.0, "comm_bytes": 3 << 29, "loss": null});
        let known: Vec<_> = scalars.of(&event).collect();
        let expected = [
            ("throughput(tps)", 25.0),
            ("throughput(tps_of_all_ranks)", 100.0),
            ("mfu(%)", 25.0),
            ("communication/received(GiB)", 1.5),
        ];
        assert_eq!(known, expected);
        assert_eq!(scalars.of(&json!({"event": "end", "seconds": 1})).count(), 0);
    }

    /// On machines without a GPU no run would show that one is missing.
    #[test]
    fn all_numbers_of_a_gpu_have_names() {
        let full = Sample {
            memory_used_bytes: Some(1),
            memory_total_bytes: Some(2),
            sm_clock_mhz: Some(3),
            memory_clock_mhz: Some(4),
            throttled: Some(vec![]),
            ecc_corrected: Some(5),
            ecc_uncorrected: Some(6),
            temperature_c: Some(7),
            power_w: Some(8.0),
        };
        let gpu = json!(full);
        let numbers = gpu.as_object().unwrap().values().filter(|v| v.is_number()).count();
        assert_eq!(Scalars::new(1).of(&json!({"event": "step", "gpu": gpu})).count(), numbers);
    }
}

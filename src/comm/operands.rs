//! Checks of a collective's operands before data moves, for groups that would otherwise access memory beyond a short
//! buffer. Never moves data.
use super::{Reduce, Tag};
use crate::base::{DType, Error, Result};
use std::ops::Range;

/// The call, for error messages.
#[derive(Clone, Copy, Debug)]
pub struct CheckedCall<'a> {
    /// World rank.
    pub rank: usize,
    pub op: &'static str,
    /// "fsdp of 4".
    pub group: &'a str,
    /// Ranks in the group.
    pub size: usize,
    pub tag: Tag,
}

impl CheckedCall<'_> {
    pub fn error(&self, what: impl Into<String>) -> Error {
        let (rank, op, group) = (self.rank, self.op, self.group.to_string());
        Error::Comm { rank, op, group, unit: self.tag.to_string(), what: what.into() }
    }
    fn refuse(&self, unless: bool, what: impl FnOnce() -> String) -> Result<()> {
        if unless { Ok(()) } else { Err(self.error(what())) }
    }

    pub fn same(&self, from: DType, into: DType) -> Result<()> {
        self.refuse(from == into, || format!("from {from} into {into}"))
    }
    /// `full` is one shard a rank.
    pub fn shards(&self, shard: usize, full: usize) -> Result<()> {
        let n = self.size;
        self.refuse(shard * n == full, || {
            format!("full has {full} elements, but {n} shards of {shard} are {}", n * shard)
        })
    }
    pub fn rank(&self, rank: usize) -> Result<()> {
        self.refuse(rank < self.size, || format!("no rank {rank} in a group of {}", self.size))
    }
    /// The parts of an all_to_all: one range per rank on each side, within the buffers; its own are of equal length.
    pub fn parts(&self, me: usize, send: (usize, &[Range<usize>]), recv: (usize, &[Range<usize>])) -> Result<()> {
        for (name, (len, parts)) in [("send", send), ("recv", recv)] {
            let n = self.size;
            self.refuse(parts.len() == n, || format!("{} parts of {name} in a group of {n}", parts.len()))?;
            let outside = parts.iter().position(|part| part.start > part.end || part.end > len);
            self.refuse(outside.is_none(), || {
                let rank = outside.unwrap_or(0);
                format!("{name} has {len} elements, but the part of rank {rank} is {:?}", parts[rank])
            })?;
        }
        let (from, into) = (send.1[me].len(), recv.1[me].len());
        self.refuse(from == into, || format!("{from} elements into {into}"))
    }
    /// Whether sums and maxima are defined for the dtype.
    pub fn reducible(&self, dtype: DType, op: Reduce) -> Result<()> {
        let float = matches!(dtype, DType::F32 | DType::F64 | DType::Bf16 | DType::F16);
        self.refuse(float, || format!("{op:?} of {dtype}: needs f32, f64, bf16 or f16"))
    }
    /// Input and output dtypes of a reduce_scatter.
    pub fn scattered(&self, full: DType, shard: DType) -> Result<()> {
        self.refuse(full != DType::F64, || "needs f32, bf16 or f16, got f64".into())?;
        self.reducible(full, Reduce::Sum)?;
        self.refuse(shard == full || shard == DType::F32, || format!("from {full} into {shard}"))
    }
    /// A gather may be in place if the shard is exactly this rank's part of the full buffer. Any other overlap is
    /// refused. Addresses in bytes; `index` is this rank's index in the group.
    pub fn overlap(&self, shard: std::ops::Range<usize>, full: std::ops::Range<usize>, index: usize) -> Result<()> {
        let apart = shard.end <= full.start || full.end <= shard.start;
        let own = shard.start == full.start + index * shard.len();
        self.refuse(apart || own || shard.is_empty(), || {
            "the shard overlaps the full buffer, but not at this rank's place".into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_both_sizes() {
        let call = CheckedCall { rank: 3, op: "all_gather", group: "fsdp of 4", size: 4, tag: Tag::new("gather", 7) };
        call.shards(5, 20).unwrap();
        let text = call.shards(5, 21).unwrap_err().to_string();
        assert_eq!(text, "rank 3: all_gather on fsdp of 4 (gather 7): full has 21 elements, but 4 shards of 5 are 20");
        call.same(DType::F32, DType::F32).unwrap();
        assert!(call.same(DType::F32, DType::Bf16).unwrap_err().to_string().ends_with("from f32 into bf16"));
        assert!(call.rank(4).unwrap_err().to_string().ends_with("no rank 4 in a group of 4"));
        assert!(call.reducible(DType::U32, Reduce::Sum).is_err());
        call.reducible(DType::F64, Reduce::Max).unwrap();
        call.scattered(DType::F16, DType::F16).unwrap();
        call.scattered(DType::Bf16, DType::F32).unwrap();
        assert!(call.scattered(DType::F32, DType::Bf16).unwrap_err().to_string().ends_with("from f32 into bf16"));
        assert!(call.scattered(DType::Bf16, DType::F16).is_err());
        assert!(call.scattered(DType::F64, DType::F64).is_err());
    }

    #[test]
    fn a_gather_may_be_in_place_and_nowhere_else() {
        let call = CheckedCall { rank: 1, op: "all_gather", group: "dp of 2", size: 2, tag: Tag::new("gather", 0) };
        call.overlap(100..200, 1000..1200, 1).unwrap(); // disjoint
        call.overlap(1100..1200, 1000..1200, 1).unwrap(); // its own place
        assert!(call.overlap(1000..1100, 1000..1200, 1).is_err()); // rank 0's place
        assert!(call.overlap(950..1050, 1000..1200, 1).is_err());
    }
}

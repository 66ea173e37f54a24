//! What a collective computes from its ranks' parts: gathers, sums, copies. Sums go around a ring, rounded to the dtype
//! at each hop, and each rank's chunk starts at the next rank: like the real library, an order of its own.
use super::code::{INVALID_ARGUMENT, INVALID_USAGE};
use half::{bf16, f16};

/// Bytes of an element, by `ncclDataType_t`.
pub fn size(dtype: u64) -> Option<usize> {
    [1, 1, 4, 4, 8, 8, 2, 4, 8, 2].get(dtype as usize).copied()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum NcclOperation {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
}
impl NcclOperation {
    pub fn of(word: u64) -> Option<NcclOperation> {
        [NcclOperation::AllGather, NcclOperation::ReduceScatter, NcclOperation::AllReduce, NcclOperation::Broadcast]
            .into_iter()
            .find(|operation| *operation as u64 == word)
    }
    /// Elements that a rank contributes and receives, for a call's count.
    pub fn elements(self, count: usize, ranks: usize) -> (usize, usize) {
        match self {
            NcclOperation::AllGather => (count, ranks * count),
            NcclOperation::ReduceScatter => (ranks * count, count),
            NcclOperation::AllReduce | NcclOperation::Broadcast => (count, count),
        }
    }
}

/// The call's parameters, which all ranks must agree on: operation, dtype, reduction (above its lowest byte: which
/// buffers are registered), root, count.
pub type CallWords = [u64; 5];

/// Each rank's result. `parts` are in rank order.
pub fn results(words: CallWords, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>, (i32, String)> {
    let ranks = parts.len();
    let wrong = |what: String| (INVALID_ARGUMENT, what);
    let operation = NcclOperation::of(words[0]).ok_or_else(|| wrong(format!("operation {}", words[0])))?;
    let (count, width) = (words[4] as usize, size(words[1]).ok_or_else(|| wrong(format!("dtype {}", words[1])))?);
    match operation {
        NcclOperation::AllGather => {
            let all = parts.concat();
            Ok(vec![all; ranks])
        }
        NcclOperation::Broadcast => {
            let root = parts.get(words[3] as usize).ok_or_else(|| wrong(format!("root {} of {ranks}", words[3])))?;
            Ok(vec![root.to_vec(); ranks])
        }
        NcclOperation::AllReduce => {
            // Chunks of the ring, in whole elements.
            let chunk = count.div_ceil(ranks).max(1) * width;
            let mut sum = Vec::with_capacity(count * width);
            for (first, at) in (0..count * width).step_by(chunk).enumerate() {
                let pieces: Vec<&[u8]> = parts.iter().map(|part| &part[at..(at + chunk).min(count * width)]).collect();
                sum.extend(ring_sum(words[1], words[2], first, &pieces)?);
            }
            Ok(vec![sum; ranks])
        }
        NcclOperation::ReduceScatter => {
            let bytes = count * width;
            let piece = |to: usize| {
                let pieces: Vec<&[u8]> = parts.iter().map(|part| &part[to * bytes..(to + 1) * bytes]).collect();
                ring_sum(words[1], words[2], to, &pieces)
            };
            (0..ranks).map(piece).collect()
        }
    }
}

/// The sum that starts at the rank after `first`, hop by hop.
fn ring_sum(dtype: u64, op: u64, first: usize, pieces: &[&[u8]]) -> Result<Vec<u8>, (i32, String)> {
    let n = pieces.len();
    let mut sum = pieces[(first + 1) % n].to_vec();
    for hop in 2..=n {
        let next = pieces[(first + hop) % n];
        hop_by(dtype, op, &mut sum, next)?;
    }
    Ok(sum)
}

fn hop_by(dtype: u64, op: u64, sum: &mut [u8], next: &[u8]) -> Result<(), (i32, String)> {
    let op = op & 0xff;
    macro_rules! elements {
        ($t:ty, $add:expr, $max:expr) => {{
            const WIDTH: usize = size_of::<$t>();
            for (s, x) in sum.chunks_exact_mut(WIDTH).zip(next.chunks_exact(WIDTH)) {
                let of = |bytes: &[u8]| <$t>::from_le_bytes(std::array::from_fn(|i| bytes[i]));
                let (a, b) = (of(s), of(x));
                let both: $t = if op == 0 { $add(a, b) } else { $max(a, b) };
                s.copy_from_slice(&both.to_le_bytes());
            }
        }};
    }
    if !matches!(op, 0 | 2) {
        return Err((INVALID_USAGE, format!("the simulated NCCL supports sum and max, not reduction {op}")));
    }
    match dtype {
        1 => elements!(u8, u8::wrapping_add, u8::max),
        2 => elements!(i32, i32::wrapping_add, i32::max),
        3 => elements!(u32, u32::wrapping_add, u32::max),
        5 => elements!(u64, u64::wrapping_add, u64::max),
        6 => elements!(f16, |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32()), f16::max),
        7 => elements!(f32, |a: f32, b: f32| a + b, f32::max),
        8 => elements!(f64, |a: f64, b: f64| a + b, f64::max),
        9 => elements!(bf16, |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32()), bf16::max),
        other => return Err((INVALID_USAGE, format!("the simulated NCCL cannot reduce dtype {other}"))),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn each_rank_gets_its_part() {
        let parts = [bytes(&[1.0, 2.0, 3.0]), bytes(&[10.0, 20.0, 30.0]), bytes(&[100.0, 200.0, 300.0])];
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let of = |operation: NcclOperation, op, root, count| {
            results([operation as u64, 7, op, root, count], &parts).unwrap()
        };
        assert_eq!(of(NcclOperation::AllReduce, 0, 0, 3), vec![bytes(&[111.0, 222.0, 333.0]); 3]);
        assert_eq!(of(NcclOperation::AllReduce, 0x300, 0, 3)[0], bytes(&[111.0, 222.0, 333.0]), "registered");
        assert_eq!(of(NcclOperation::AllReduce, 2, 0, 3)[1], bytes(&[100.0, 200.0, 300.0]));
        assert_eq!(of(NcclOperation::ReduceScatter, 0, 0, 1), [bytes(&[111.0]), bytes(&[222.0]), bytes(&[333.0])]);
        assert_eq!(of(NcclOperation::Broadcast, 0, 1, 3), vec![bytes(&[10.0, 20.0, 30.0]); 3]);
        assert_eq!(of(NcclOperation::AllGather, 0, 0, 3)[2].len(), 36);
        assert_eq!(results([2, 7, 4, 0, 3], &parts).unwrap_err().0, INVALID_USAGE);
    }

    /// 1 + 2^-8 + 2^-8 in bf16: rounded to even at each hop it stays 1; the order starts after the chunk's own rank.
    #[test]
    fn sums_are_rounded_at_each_hop() {
        let tiny = bf16::from_f32(2f32.powi(-8)).to_le_bytes();
        let one = bf16::ONE.to_le_bytes();
        let sum = |parts: [[u8; 2]; 3]| {
            let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_slice()).collect();
            let all = results([NcclOperation::AllReduce as u64, 9, 0, 0, 1], &parts).unwrap();
            bf16::from_le_bytes([all[0][0], all[0][1]]).to_f32()
        };
        // Starting at rank 1: (tiny + tiny) + 1 there, (1 + tiny) + tiny where rank 1 holds the one.
        assert_eq!(sum([one, tiny, tiny]), 1.0 + 2f32.powi(-7));
        assert_eq!(sum([tiny, one, tiny]), 1.0);
    }
}

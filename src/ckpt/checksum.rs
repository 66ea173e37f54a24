//! Additive checksums of tensors: ranks sum over the elements they own, however a tensor is sharded. Never reads files.

/// 2^64 / golden ratio, whose multiples are evenly spread (Weyl's sequence, as in splitmix64).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
/// An odd number with equally many ones and zeros (splitmix64's first multiplier).
const MULTIPLIER: u64 = 0xbf58_476d_1ce4_e5b9;

/// The wrapping sum over f32 elements of fold((index * GOLDEN ^ bits) * MULTIPLIER), where fold XORs the halves of the
/// 128-bit product (wyhash's mixing step). It is a sum, so that ranks can add theirs for any sharding, and depends on
/// the index, so that swapped elements are detected. `first` is the index in the tensor of the first element of
/// `bytes`.
pub fn checksum(bytes: &[u8], first: usize) -> u64 {
    let mut key = (first as u64).wrapping_mul(GOLDEN);
    let mut sum = 0u64;
    for element in bytes.as_chunks::<4>().0 {
        let product = (key ^ u32::from_le_bytes(*element) as u64) as u128 * MULTIPLIER as u128;
        sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        key = key.wrapping_add(GOLDEN);
    }
    sum
}

/// The checksum of every tensor: the sum of the ranks' sums.
pub(super) fn total(ranks: &[Vec<u64>], tensors: usize) -> Vec<u64> {
    (0..tensors).map(|i| ranks.iter().fold(0u64, |sum, rank| sum.wrapping_add(rank[i]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn checksums_of_parts_sum_to_that_of_the_whole() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
        let whole = checksum(&bytes(&values), 0);
        for cut in [0, 1, 7, 128, 999, 1000] {
            let (a, b) = values.split_at(cut);
            assert_eq!(checksum(&bytes(a), 0).wrapping_add(checksum(&bytes(b), cut)), whole, "cut at {cut}");
        }
    }

    #[test]
    fn flipped_bits_and_swapped_elements_are_detected() {
        let values: Vec<f32> = (0..300).map(|i| (i as f32).sqrt()).collect();
        let whole = checksum(&bytes(&values), 0);
        for bit in 0..32 * values.len() {
            let mut damaged = bytes(&values);
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(checksum(&damaged, 0), whole, "bit {bit}");
        }
        for i in 1..values.len() {
            let mut exchanged = values.clone();
            exchanged.swap(i - 1, i);
            assert_ne!(checksum(&bytes(&exchanged), 0), whole, "{i} and the one before it");
        }
        // Flipped signs of two elements differ by powers of two, which would cancel in a plain sum of products.
        for (i, j) in (0..200).flat_map(|i| (i + 1..200).map(move |j| (i, j))) {
            let mut flipped = values.clone();
            flipped[i] = -flipped[i];
            flipped[j] = -flipped[j];
            assert_ne!(checksum(&bytes(&flipped), 0), whole, "signs of {i} and {j}");
        }
    }
}

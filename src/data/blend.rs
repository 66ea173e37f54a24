//! Picks the source of each sample of a mixture: exact shares, to within one sample, at every point of a run. Never
//! knows rows.
use crate::base::{Error, Result};

/// Maximum samples per period, so weights have a resolution of one millionth of their sum.
const LONGEST: u64 = 1_000_000;

/// [Note: blends] Weights become the number of samples each source has in a period: 0.7 and 0.3 are 7 and 3 of 10. The
/// quota method (Balinski and Young, "The quota method of apportionment", 1975) assigns the slots of a period: of the
/// sources below their share, the one that is due first. After n samples a source of share p has provided p n of them,
/// rounded up or down, for every n. Periods repeat, so the source of any sample, and its number among the samples of
/// that source, are a table lookup: a resumed run replays nothing, and nothing depends on a seed or a mesh.
#[derive(Clone, Debug, PartialEq)]
pub struct Blend {
    /// Samples of each source per period.
    shares: Vec<u64>,
    /// For each sample of a period: its source, and how many earlier samples came from that source.
    slots: Vec<(u32, u32)>,
}

impl Blend {
    /// `weights` are above 0, in any unit.
    pub fn new(weights: &[f64]) -> Result<Blend> {
        if let Some(weight) = weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
            return Err(Error::input(format!(
                "`dataset_weights`: the weight {weight} is not a number above 0. To exclude a data set, remove it"
            )));
        }
        let shares = exact(weights).unwrap_or_else(|| rounded(weights));
        if let Some(at) = shares.iter().position(|&share| share == 0) {
            return Err(Error::input(format!(
                "`dataset_weights`: the weight {} is less than a millionth of the sum of the weights: raise it or \
                 remove its data set",
                weights[at]
            )));
        }
        let (period, mut given) = (shares.iter().sum::<u64>(), vec![0u64; shares.len()]);
        let slot = |n: u64| {
            let behind = (0..shares.len()).filter(|&i| given[i] * period < shares[i] * n);
            // Due when its share of the samples reaches one more: the smallest (given + 1) / share.
            let first = behind.min_by(|&a, &b| ((given[a] + 1) * shares[b]).cmp(&((given[b] + 1) * shares[a])));
            let source = first.unwrap_or(0); // shares sum to the period, so some source is below its share
            given[source] += 1;
            (source as u32, (given[source] - 1) as u32)
        };
        let slots = (1..=period).map(slot).collect();
        Ok(Blend { shares, slots })
    }

    /// Samples of each source per period.
    pub fn shares(&self) -> &[u64] {
        &self.shares
    }
    /// A source's fraction of all samples.
    pub fn share(&self, source: usize) -> f64 {
        self.shares[source] as f64 / self.slots.len() as f64
    }
    /// The source of sample `n`, and its number among that source's samples.
    pub fn at(&self, n: u64) -> (usize, u64) {
        let (periods, slot) = (n / self.slots.len() as u64, n % self.slots.len() as u64);
        let (source, before) = self.slots[slot as usize];
        (source as usize, periods * self.shares[source as usize] + before as u64)
    }
    /// Samples of each source among the first `n`.
    pub fn counts(&self, n: u64) -> Vec<u64> {
        let (periods, slot) = (n / self.slots.len() as u64, n % self.slots.len() as u64);
        let mut counts: Vec<u64> = self.shares.iter().map(|share| periods * share).collect();
        self.slots[..slot as usize].iter().for_each(|&(source, _)| counts[source as usize] += 1);
        counts
    }
}

/// The smallest integers in the ratio of `weights`, if those have at most six decimal places: 1 and 2, or 0.125 and
/// 0.875.
fn exact(weights: &[f64]) -> Option<Vec<u64>> {
    let whole = |x: f64| ((x - x.round()).abs() <= 1e-9 * x && x <= LONGEST as f64).then_some(x.round() as u64);
    let units = (0..=6).map(|places| 10f64.powi(places));
    let shares =
        units.filter_map(|unit| weights.iter().map(|w| whole(w * unit)).collect::<Option<Vec<u64>>>()).next()?;
    let divisor = shares.iter().copied().fold(0, divisor);
    let shares: Vec<u64> = shares.iter().map(|share| share / divisor.max(1)).collect();
    (shares.iter().sum::<u64>() <= LONGEST).then_some(shares)
}

/// Greatest common divisor.
fn divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { divisor(b, a % b) }
}

/// Shares of the longest period, by largest remainder.
fn rounded(weights: &[f64]) -> Vec<u64> {
    // Relative to the largest: a sum of large numbers may overflow.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let sum: f64 = weights.iter().map(|w| w / largest).sum();
    let ideal: Vec<f64> = weights.iter().map(|w| w / largest / sum * LONGEST as f64).collect();
    let mut shares: Vec<u64> = ideal.iter().map(|x| *x as u64).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| ideal[b].fract().total_cmp(&ideal[a].fract()));
    let left = LONGEST.saturating_sub(shares.iter().sum());
    order.iter().cycle().take(left as usize).for_each(|&i| shares[i] += 1);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::rng::Rng;

    #[test]
    fn weights_become_the_shortest_period() {
        let shares = |weights: &[f64]| Blend::new(weights).unwrap().shares;
        assert_eq!(shares(&[0.7, 0.3]), [7, 3]);
        assert_eq!(shares(&[1.0, 2.0]), [1, 2]);
        assert_eq!(shares(&[30.0, 10.0, 20.0]), [3, 1, 2]);
        assert_eq!(shares(&[0.123456, 0.876544]), [1929, 13696]);
        assert_eq!(shares(&[5.0]), [1]);
        let thirds = shares(&[1.0 / 3.0, 2.0 / 3.0]);
        assert_eq!(thirds, [333_333, 666_667]);
        assert_eq!(shares(&[f64::MAX, f64::MAX / 3.0]).iter().sum::<u64>(), LONGEST);
        for bad in [&[1.0, 0.0][..], &[1.0, -0.5], &[f64::NAN, 1.0], &[f64::INFINITY, 1.0], &[1e7, 1.0]] {
            assert_eq!(Blend::new(bad).unwrap_err().exit_status(), 2, "{bad:?}");
        }
    }

    #[test]
    fn after_every_sample_each_source_has_its_share_rounded_up_or_down() {
        let rng = Rng::new(4, 2);
        let random =
            (2..40).map(|n| (0..n).map(|i| 1.0 + (rng.uniform(100 * n + i).powi(6) * 300.0).floor()).collect());
        let cases = [vec![0.9, 0.05, 0.05], vec![0.5; 3], vec![90.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]];
        for weights in random.chain(cases) {
            let (blend, total) = (Blend::new(&weights).unwrap(), weights.iter().sum::<f64>());
            let mut counts = vec![0u64; weights.len()];
            for n in 0..2 * blend.slots.len() as u64 + 3 {
                assert!(n % 97 > 0 || blend.counts(n) == counts);
                let (source, number) = blend.at(n);
                assert_eq!(number, counts[source]);
                counts[source] += 1;
                for (count, weight) in counts.iter().zip(&weights) {
                    let due = (n + 1) as f64 * weight / total;
                    assert!((*count as f64 - due).abs() < 1.0, "{count} of {due} after {n}: {weights:?}");
                }
            }
        }
    }
}

//! The choice of a token from logits: a function of them, the settings and one uniform number. Never runs a model.
use crate::base::rng::Rng;

/// How the next token is sampled: among the `top_k` most likely, the fewest whose probabilities sum to `top_p`, and
/// those with at least `min_p` of the largest probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// 0: no limit.
    pub top_k: usize,
    /// 1: no limit.
    pub top_p: f32,
    /// 0: no limit.
    pub min_p: f32,
    pub seed: u64,
    /// The step of training that the text is for.
    pub step: u64,
}

impl Default for Sampling {
    /// Samples from the model's own distribution.
    fn default() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, step: 0 }
    }
}

impl Sampling {
    /// A number in [0, 1) for a token: it depends on nothing but the seed, the step, which sample of which prompt it
    /// is, and its position.
    pub(super) fn uniform(&self, prompt: u64, sample: u64, position: u64) -> f64 {
        let of_step = Rng::new(Rng::named(self.seed, "generate").key(), self.step);
        let of_prompt = Rng::new(of_step.key(), prompt);
        Rng::new(of_prompt.key(), sample).uniform(position)
    }
}

/// The most tokens that are sorted, unless `top_p` needs more.
const LIKELY: usize = 1024;

/// Inverse-transform sampling: the token whose interval of the cumulative distribution contains `u` in [0, 1). Filters
/// apply in the order of transformers: temperature, `top_k`, `top_p`, `min_p`.
pub(super) fn pick(logits: &[f32], sampling: &Sampling, u: f64) -> u32 {
    let (likeliest, top) =
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
    let Sampling { temperature, top_k, top_p, min_p, .. } = *sampling;
    if temperature <= 0.0 {
        return likeliest as u32;
    }
    let share = |&x: &f32| ((x - top) / temperature).exp() as f64;
    let mut shares: Vec<(usize, f64)> = logits.iter().map(share).enumerate().collect();
    if top_k > 0 || top_p < 1.0 {
        let all = if top_k > 0 { f64::INFINITY } else { shares.iter().map(|s| s.1).sum() };
        sort_likeliest(&mut shares, top_k, top_p as f64 * all);
        if top_k > 0 {
            shares.truncate(top_k);
        }
        let all = if top_k > 0 { shares.iter().map(|s| s.1).sum() } else { all };
        let enough = top_p as f64 * all;
        let mut sum = 0.0;
        let mut more = |&(_, share): &(usize, f64)| {
            let more = sum < enough;
            sum += share;
            more
        };
        let kept = shares.iter().take_while(|s| more(s)).count();
        shares.truncate(kept.max(1));
    }
    if min_p > 0.0 {
        // The largest share is 1.
        shares.retain(|share| share.1 >= min_p as f64);
    }
    let mut left = u * shares.iter().map(|s| s.1).sum::<f64>();
    for &(token, share) in &shares {
        left -= share;
        if left < 0.0 {
            return token as u32;
        }
    }
    likeliest as u32 // rounding left a gap at the end, or the logits are NaN
}

/// Sorts the shares by size, equal ones by token: at least the first `count`, or those that sum to `enough`. Cuts off
/// others if it can.
fn sort_likeliest(shares: &mut Vec<(usize, f64)>, count: usize, enough: f64) {
    let order = |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let few = if count > 0 { count } else { LIKELY };
    if few < shares.len() {
        shares.select_nth_unstable_by(few, order);
        if count > 0 || shares[..few].iter().map(|share| share.1).sum::<f64>() >= enough {
            shares.truncate(few);
        }
    }
    shares.sort_unstable_by(order);
}

#[cfg(test)]
mod tests {
    use super::{Sampling, pick};

    fn at(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::default() }
    }

    #[test]
    fn temperature_zero_picks_the_first_most_likely() {
        assert_eq!(pick(&[0.0, 3.0, 1.0, 3.0], &at(0.0), 0.9), 1);
    }

    #[test]
    fn probabilities_are_those_of_softmax() {
        // exp: 1, 2, 1 -> probabilities 1/4, 1/2, 1/4.
        let logits = [0.0, 2f32.ln(), 0.0];
        for (u, token) in [(0.0, 0), (0.24, 0), (0.26, 1), (0.74, 1), (0.76, 2), (0.999_999, 2)] {
            assert_eq!(pick(&logits, &at(1.0), u), token, "u = {u}");
        }
        // At temperature 0.5 the probabilities are 1/6, 4/6, 1/6.
        assert_eq!(pick(&logits, &at(0.5), 0.2), 1);
        assert_eq!(pick(&logits, &at(0.5), 0.84), 2);
    }

    #[test]
    fn top_k_and_top_p_keep_the_most_likely() {
        // Probabilities 1/10, 4/10, 2/10, 3/10.
        let logits: Vec<f32> = [1f32, 4.0, 2.0, 3.0].into_iter().map(f32::ln).collect();
        let seen = |top_k: usize, top_p: f32| {
            let sampling = Sampling { top_k, top_p, ..at(1.0) };
            let mut seen: Vec<u32> = (0..100).map(|i| pick(&logits, &sampling, i as f64 / 100.0)).collect();
            seen.dedup();
            seen
        };
        assert_eq!(seen(0, 1.0), [0, 1, 2, 3]);
        assert_eq!(seen(3, 1.0), [1, 3, 2]); // ordered by probability
        assert_eq!(seen(1, 1.0), [1]);
        assert_eq!(seen(99, 0.65), [1, 3]);
        assert_eq!(seen(0, 0.75), [1, 3, 2]); // 7/10 is not enough
        assert_eq!(seen(0, 1e-9), [1]);
        assert_eq!(seen(2, 0.5), [1]); // of the two that top_k keeps, one has 4/7
        // The remaining two are sampled with probabilities 4/7 and 3/7.
        let sampling = Sampling { top_k: 2, ..at(1.0) };
        assert_eq!((pick(&logits, &sampling, 0.57), pick(&logits, &sampling, 0.58)), (1, 3));
    }

    #[test]
    fn nan_logits_still_give_a_token() {
        assert_eq!(pick(&[f32::NAN, f32::NAN], &at(1.0), 0.5), 0);
        assert!(pick(&[f32::NAN, f32::NAN], &Sampling { top_k: 1, top_p: 0.5, ..at(1.0) }, 0.5) < 2);
    }
}

//! Sums and means over pairs. Never computes a loss.
/// Sums over pairs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PairSums {
    pub loss: f64,
    /// Rewards of the chosen and of the rejected answers.
    pub chosen: f64,
    pub rejected: f64,
    /// Pairs whose chosen answer has the larger reward.
    pub accurate: f64,
    pub pairs: f64,
}

impl PairSums {
    pub(in crate::engine) const LEN: usize = 5;

    pub(in crate::engine) fn to_array(self) -> [f64; PairSums::LEN] {
        let PairSums { loss, chosen, rejected, accurate, pairs } = self;
        [loss, chosen, rejected, accurate, pairs]
    }
    pub(in crate::engine) fn from_array([loss, chosen, rejected, accurate, pairs]: [f64; PairSums::LEN]) -> PairSums {
        PairSums { loss, chosen, rejected, accurate, pairs }
    }
    /// Means over the pairs; 0 without any.
    pub fn means(&self) -> PairMeans {
        let mean = |sum: f64| sum / self.pairs.max(1.0);
        PairMeans {
            reward_chosen: mean(self.chosen),
            reward_rejected: mean(self.rejected),
            reward_accuracy: mean(self.accurate),
        }
    }
}

impl std::ops::AddAssign for PairSums {
    fn add_assign(&mut self, other: PairSums) {
        let (mut sums, other) = (self.to_array(), other.to_array());
        sums.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
        *self = PairSums::from_array(sums);
    }
}

/// Means over pairs.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct PairMeans {
    pub reward_chosen: f64,
    pub reward_rejected: f64,
    /// Share of the pairs whose chosen answer has the larger reward.
    pub reward_accuracy: f64,
}

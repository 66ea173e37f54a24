//! Sets of times, as sorted disjoint intervals. Never interprets them.

/// Half-open intervals in nanoseconds.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Intervals(Vec<(i64, i64)>);

impl FromIterator<(i64, i64)> for Intervals {
    /// The union. An interval whose end is not after its start is empty.
    fn from_iter<I: IntoIterator<Item = (i64, i64)>>(intervals: I) -> Intervals {
        let mut sorted: Vec<(i64, i64)> = intervals.into_iter().filter(|(from, to)| from < to).collect();
        sorted.sort_unstable();
        let mut union: Vec<(i64, i64)> = Vec::with_capacity(sorted.len());
        for (from, to) in sorted {
            match union.last_mut().filter(|last| from <= last.1) {
                Some(last) => last.1 = last.1.max(to),
                None => union.push((from, to)),
            }
        }
        Intervals(union)
    }
}

impl Intervals {
    pub fn union(&self, other: &Intervals) -> Intervals {
        self.0.iter().chain(&other.0).copied().collect()
    }
    /// The difference.
    pub fn minus(&self, other: &Intervals) -> Intervals {
        let (mut left, mut holes) = (Vec::with_capacity(self.0.len()), &other.0[..]);
        for &(mut from, to) in &self.0 {
            holes = &holes[holes.partition_point(|hole| hole.1 <= from)..];
            for &(start, end) in holes.iter().take_while(|hole| hole.0 < to) {
                if from < start {
                    left.push((from, start));
                }
                from = from.max(end);
            }
            if from < to {
                left.push((from, to));
            }
        }
        Intervals(left)
    }
    pub fn seconds(&self) -> f64 {
        self.0.iter().map(|(from, to)| to - from).sum::<i64>() as f64 / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::rng::Rng;

    fn set(intervals: &[(i64, i64)]) -> Intervals {
        intervals.iter().copied().collect()
    }

    #[test]
    fn unions_join_what_touches_and_differences_cut() {
        assert_eq!(set(&[(5, 7), (0, 2), (2, 3), (6, 9), (4, 4), (8, 1)]).0, [(0, 3), (5, 9)]);
        let a = set(&[(0, 10), (20, 30)]);
        assert_eq!(a.minus(&set(&[(3, 4), (8, 22), (29, 40)])).0, [(0, 3), (4, 8), (22, 29)]);
        assert_eq!(a.minus(&set(&[(-5, 50)])).0, []);
        assert_eq!(a.minus(&set(&[(10, 20), (30, 31)])), a);
        assert_eq!(a.minus(&Intervals::default()), a);
        assert_eq!((a.seconds(), a.union(&set(&[(10, 20)])).seconds()), (20e-9, 30e-9));
    }

    #[test]
    fn they_agree_with_a_set_of_points() {
        let rng = Rng::new(1, 2);
        let draw = |n: u64| -> Vec<(i64, i64)> {
            let at = |i| (rng.u64(n * 100 + i) % 60) as i64;
            (0..n % 9).map(|i| (at(2 * i), at(2 * i + 1))).collect()
        };
        let has = |intervals: &[(i64, i64)], x: i64| intervals.iter().any(|&(from, to)| from <= x && x < to);
        for n in 1..400 {
            let (a, b) = (draw(n), draw(n + 1000));
            let (minus, union) = (set(&a).minus(&set(&b)), set(&a).union(&set(&b)));
            for x in -1..61 {
                assert_eq!(has(&minus.0, x), has(&a, x) && !has(&b, x), "{x} of {a:?} minus {b:?}: {minus:?}");
                assert_eq!(has(&union.0, x), has(&a, x) || has(&b, x), "{x} of {a:?} and {b:?}: {union:?}");
            }
            assert!(minus.0.windows(2).all(|w| w[0].1 < w[1].0), "{minus:?}");
        }
    }
}

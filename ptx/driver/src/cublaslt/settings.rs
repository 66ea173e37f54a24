//! FLATSHARD_SIMBLAS: which algorithms there are, and which is fast. See [`super`].
use crate::code::say;
use crate::settings::variable;
use std::sync::OnceLock;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LtSettings {
    /// There are no epilogues.
    pub plain: bool,
    /// Algorithms of each product.
    pub algorithms: usize,
    /// The one that takes no simulated time.
    pub fastest: usize,
    /// As of cublasLtGetVersion.
    pub version: usize,
}

impl LtSettings {
    pub fn get() -> LtSettings {
        static READ: OnceLock<LtSettings> = OnceLock::new();
        *READ.get_or_init(|| {
            let rank = variable("RANK").and_then(|rank| rank.parse().ok()).unwrap_or(0);
            LtSettings::parse(&variable("FLATSHARD_SIMBLAS").unwrap_or_default(), rank).unwrap_or_else(|what| {
                say(&what);
                std::process::exit(2)
            })
        })
    }
    fn parse(text: &str, rank: usize) -> Result<LtSettings, String> {
        let mut settings = LtSettings { plain: false, algorithms: 1, fastest: 0, version: 130_401 };
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let wrong = || format!("FLATSHARD_SIMBLAS: {word:?} is not a setting");
            match word.split_once('=') {
                None if word == "plain" => settings.plain = true,
                Some(("algorithms", n)) => settings.algorithms = n.parse().map_err(|_| wrong())?,
                Some(("version", n)) => settings.version = n.parse().map_err(|_| wrong())?,
                Some(("fastest", "rank")) => settings.fastest = rank + 1,
                Some(("fastest", i)) => settings.fastest = i.parse().map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        settings.fastest %= settings.algorithms.max(1);
        Ok(settings)
    }
    pub fn time(&self, algorithm: usize) -> Duration {
        Duration::from_secs(u64::from(algorithm != self.fastest))
    }
    /// Partial sums of an element.
    pub fn partial(algorithm: usize) -> usize {
        8 - algorithm % 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_words_and_numbers_and_anything_else_is_named() {
        let s = LtSettings::parse("plain,algorithms=3,fastest=rank,version=120803", 4).unwrap();
        assert_eq!(s, LtSettings { plain: true, algorithms: 3, fastest: 2, version: 120_803 });
        assert_eq!([0, 1, 2].map(|i| s.time(i).as_secs()), [1, 1, 0]);
        for wrong in ["fast", "algorithms=x", "fastest"] {
            assert!(LtSettings::parse(wrong, 0).unwrap_err().contains(wrong), "{wrong}");
        }
    }
}

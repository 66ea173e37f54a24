//! `NAME[FROM:TO]`: some rows of a data set, as the library `datasets` slices a split. Never reads a row.
use crate::base::{Error, Result, quote};
use std::ops::Range;
use std::path::Path;

/// Rows between two boundaries, in the order of the files, before any row is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowSlice {
    from: Option<i64>,
    to: Option<i64>,
    /// The boundaries are hundredths of all rows.
    percent: bool,
}

impl RowSlice {
    /// A name without the slice behind it; an existing path has none. Text in brackets without a colon is a part of
    /// the name.
    pub fn cut(text: &str) -> (&str, &str) {
        let at = text.strip_suffix(']').and_then(|open| open.rfind('[')).filter(|&at| text[at..].contains(':'));
        text.split_at(at.filter(|_| !Path::new(text).exists()).unwrap_or(text.len()))
    }

    /// The path and the slice that `text` names.
    pub(super) fn of(path: &Path) -> Result<(&Path, Option<RowSlice>)> {
        let Some((name, slice)) = path.to_str().map(RowSlice::cut).filter(|(_, slice)| !slice.is_empty()) else {
            return Ok((path, None));
        };
        let parsed = RowSlice::parse(slice).ok_or_else(|| {
            Error::input(format!(
                "`dataset` {}: {} is no slice: write [FROM:TO] in rows or in percent, such as [:500] or [90%:]",
                path.display(),
                quote(slice)
            ))
        })?;
        Ok((Path::new(name), Some(parsed)))
    }

    fn parse(text: &str) -> Option<RowSlice> {
        let (from, to) = text.strip_prefix('[')?.strip_suffix(']')?.split_once(':')?;
        let percent = from.ends_with('%') || to.ends_with('%');
        let boundary = |text: &str| match text.strip_suffix('%').unwrap_or(text) {
            "" => Some(None),
            number => number.parse().ok().filter(|n: &i64| !percent || n.abs() <= 100).map(Some),
        };
        Some(RowSlice { from: boundary(from)?, to: boundary(to)?, percent })
    }

    /// Whether the number of all rows matters: a boundary is counted from the end, or in percent.
    pub(super) fn needs_count(&self) -> bool {
        self.percent || [self.from, self.to].into_iter().flatten().any(|n| n < 0)
    }
    /// Without need of a count: no row from here on is read.
    pub(super) fn end(&self) -> u64 {
        self.to.map_or(u64::MAX, |to| to as u64)
    }

    /// The rows out of so many. Percentages are rounded as in `datasets` (`closest`), halves to even.
    pub(super) fn range(&self, rows: u64) -> Range<u64> {
        let rows = rows.min(i64::MAX as u64) as i64;
        let at = |n: i64| if self.percent { (n as f64 * rows as f64 / 100.0).round_ties_even() as i64 } else { n };
        let within = |n: i64| (if n < 0 { rows + n } else { n }).clamp(0, rows) as u64;
        let (from, to) = (self.from.map_or(0, at), self.to.map_or(rows, at));
        within(from)..within(to).max(within(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `datasets` 5.2: `ReadInstruction.from_spec(f"train{slice}").to_absolute({"train": rows})`.
    #[test]
    fn slices_are_those_of_datasets() {
        for (slice, rows, range) in [
            ("[:500]", 1000, 0..500),
            ("[:500]", 30, 0..30),
            ("[10:20]", 1000, 10..20),
            ("[-10:]", 1000, 990..1000),
            ("[:-10]", 1000, 0..990),
            ("[:]", 7, 0..7),
            ("[:10%]", 25, 0..2),
            ("[10%:]", 25, 2..25),
            ("[:50%]", 25, 0..12),
            ("[50%:]", 27, 14..27),
            ("[-20%:]", 1000, 800..1000),
            ("[10:20%]", 1000, 100..200),
            ("[90%:100%]", 199, 179..199),
            ("[-200:]", 30, 0..30),
            ("[:-10%]", 25, 0..23),
        ] {
            assert_eq!(RowSlice::parse(slice).unwrap().range(rows), range, "{slice} of {rows}");
        }
        for bad in ["[:101%]", "[a:]", "[1:2:3]", "[:5.5%]", "[: 5]"] {
            assert_eq!(RowSlice::parse(bad), None, "{bad}");
        }
        assert_eq!(RowSlice::cut("o/d:train[:10%]"), ("o/d:train", "[:10%]"));
        assert_eq!(RowSlice::cut("rows[0].jsonl"), ("rows[0].jsonl", ""));
        assert_eq!(RowSlice::cut("rows[0]"), ("rows[0]", ""));
    }
}

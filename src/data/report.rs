//! What was found in a data set, in one line. Never reads it.

/// What was found, for people and for the metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// "Rust sources of 85 crates"
    pub what: String,
    pub files: u64,
    /// Files of a directory that were left out because they are no text.
    pub skipped: u64,
    /// Size of the files.
    pub bytes: u64,
    pub tokens: u64,
    pub rows: u64,
    /// Rows are samples that were given one by one, of up to `max_len` tokens, not cut out of a stream.
    pub samples: bool,
    pub max_len: usize,
    /// Rows of more than `max_len` tokens: their ends are not trained on.
    pub cut: u64,
    /// Rows whose prompt leaves no room for a response, or that have none: left out.
    pub dropped: u64,
    /// Rows that were no rows: left out.
    pub bad: u64,
    /// What is wrong with the first of them, where the token file was made just now.
    pub first_bad: Option<String>,
    /// The token file was made just now, not found.
    pub built: bool,
    /// The cache that could not be written, and why: each process has made the tokens for itself.
    pub unkept: Option<String>,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Report { what, files, skipped, bytes, tokens, rows, max_len, cut, dropped, bad, first_bad, .. } = self;
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        write!(f, "{what}: ")?;
        if *files > 0 {
            write!(f, "{files} file{}, {:.1} MiB, ", plural(*files), *bytes as f64 / (1 << 20) as f64)?;
        }
        match self.samples {
            true => write!(f, "{tokens} tokens in {rows} sample{} of up to {max_len}", plural(*rows))?,
            false => write!(f, "{tokens} tokens in {rows} row{} of {max_len}", plural(*rows))?,
        }
        if *skipped > 0 {
            write!(f, "; {skipped} skipped, no text")?;
        }
        if *cut > 0 {
            let (are, were) = if *cut == 1 { ("is", "was") } else { ("are", "were") };
            write!(f, "; {cut} row{} {are} longer and {were} cut", plural(*cut))?;
        }
        if *dropped > 0 {
            write!(
                f,
                "; {dropped} row{} dropped: the prompt leaves no room for a response, or there is none",
                plural(*dropped)
            )?;
        }
        if *bad > 0 {
            write!(f, "; {bad} bad row{} skipped", plural(*bad))?;
        }
        if let Some(first) = first_bad {
            write!(f, " (the first: {first})")?;
        }
        Ok(())
    }
}

impl Report {
    /// Of several data sets: their sums under the name `what`.
    pub(super) fn sum<'a>(what: String, parts: impl IntoIterator<Item = &'a Report>) -> Option<Report> {
        let mut parts = parts.into_iter();
        let mut sum = Report { what, ..parts.next()?.clone() };
        for part in parts {
            sum.files += part.files;
            sum.skipped += part.skipped;
            sum.bytes += part.bytes;
            sum.tokens += part.tokens;
            sum.rows += part.rows;
            sum.samples |= part.samples;
            sum.cut += part.cut;
            sum.dropped += part.dropped;
            sum.bad += part.bad;
            sum.first_bad = sum.first_bad.or(part.first_bad.clone());
            sum.built |= part.built;
            sum.unkept = sum.unkept.or(part.unkept.clone());
        }
        Some(sum)
    }
}

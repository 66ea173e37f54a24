//! The names of the files that a GGUF model was split into: NAME-00001-of-00003.gguf. Never opens one.

/// What comes before the number in the name of a part of a split model, and how many parts there are.
pub fn split_name(name: &str) -> Option<(&str, usize)> {
    let (stem, of) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, index) = stem.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let count = Some(of).filter(|of| digits(of) && digits(index))?.parse().ok()?;
    Some((stem, count))
}

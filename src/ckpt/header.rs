//! Parses the headers of safetensors files and their index. Pure: bytes in, a table or an error out. Never opens a
//! file, and never trusts a length, name or offset. Errors do not name the file: callers prepend its path.
use super::json::KeysOnce;
use crate::base::{Error, Result, quote};
use safetensors::{Dtype, tensor::Metadata};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// The format's own limit on the JSON header.
pub const MAX: u64 = 100_000_000;

/// A tensor in a file. `offset` is the position of its first byte in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    pub offset: u64,
}

/// Length of the JSON header of a file of `file` bytes that starts with `prefix`.
pub fn length(prefix: [u8; 8], file: u64) -> Result<u64> {
    let header = u64::from_le_bytes(prefix);
    match header {
        _ if prefix == *b"version " => Err(Error::input(
            "is a pointer of Git LFS, not the weights: run `git lfs pull`, or give the model's name on the hub, OWNER/NAME",
        )),
        _ if header > file.saturating_sub(8) => {
            Err(Error::input(format!("is truncated: it has {file} bytes, but its header alone needs {header}")))
        }
        _ if header > MAX => {
            Err(Error::input(format!("has a header of {header} bytes; the safetensors limit is {MAX}")))
        }
        _ => Ok(header),
    }
}

/// The tensors described by `json`, the header of a file of `file` bytes, ordered by offset. They do not overlap, leave
/// no gap and end at the end of the file.
pub fn tensors(json: &[u8], file: u64) -> Result<Vec<TensorEntry>> {
    let unusable = |e: &dyn fmt::Display| Error::input(format!("has an invalid header: {}", quote(e)));
    let KeysOnce(header) = serde_json::from_slice(json).map_err(|e| unusable(&e))?;
    if !header.is_object() {
        return Err(unusable(&"it is not an object"));
    }
    let meta: Metadata = serde_json::from_slice(json).map_err(|e| unusable(&e))?;
    let data = 8 + json.len() as u64;
    match data.checked_add(meta.data_len() as u64) {
        Some(promised) if promised == file => {}
        promised => {
            let promised = promised.map_or("more than any file can have".to_string(), |n| n.to_string());
            let how =
                if meta.data_len() as u64 > file.saturating_sub(data) { "is truncated" } else { "has extra bytes" };
            return Err(Error::input(format!("{how}: it has {file} bytes, but its header describes {promised}")));
        }
    }
    let mut entries: Vec<TensorEntry> = meta
        .tensors()
        .into_iter()
        .map(|(name, info)| TensorEntry {
            name,
            shape: info.shape.clone(),
            dtype: info.dtype,
            offset: data + info.data_offsets.0 as u64,
        })
        .collect();
    entries.sort_by(|a, b| (a.offset, &a.name).cmp(&(b.offset, &b.name)));
    Ok(entries)
}

/// Parses `model.safetensors.index.json`, which maps each tensor to a file of the same directory, or of one below it.
pub fn index(json: &[u8]) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: Option<KeysOnce>,
    }
    let index: Index =
        serde_json::from_slice(json).map_err(|e| Error::input(format!("is not an index ({})", quote(e))))?;
    let map = match index.weight_map {
        None => return Err(Error::input("has no weight_map")),
        Some(KeysOnce(Value::Object(map))) => map,
        Some(KeysOnce(other)) => return Err(Error::input(format!("is not an index (weight_map is {})", quote(other)))),
    };
    map.into_iter()
        .map(|(tensor, file)| match file {
            Value::String(file) => file.split('/').try_for_each(|part| plain(part).map(drop)).map(|()| (tensor, file)),
            other => {
                Err(Error::input(format!("tensor {} is in {}, which is not a file name", quote(tensor), quote(other))))
            }
        })
        .collect()
}

/// Checks that a file name stays in its directory.
pub fn plain(name: &str) -> Result<&str> {
    let plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    plain.then_some(name).ok_or_else(|| {
        Error::input(format!("names the file {}, which is not a plain file name", quote(format_args!("{name:?}"))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T: fmt::Debug>(result: Result<T>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.exit_status(), 2);
        error.to_string()
    }

    #[test]
    fn lengths_are_checked_against_the_file() {
        assert_eq!(length(90u64.to_le_bytes(), 98).unwrap(), 90);
        assert!(refused(length(91u64.to_le_bytes(), 98)).contains(
            "truncated: it has 98 bytes, but its header alone \
                                                                   needs 91"
        ));
        assert!(refused(length(u64::MAX.to_le_bytes(), 98)).contains("truncated"));
        assert!(refused(length(1u64.to_le_bytes(), 3)).contains("truncated"));
        assert!(refused(length(*b"version ", 131)).contains("git lfs pull"));
        assert!(refused(length((MAX + 1).to_le_bytes(), u64::MAX)).contains("limit is 100000000"));
    }

    #[test]
    fn headers_have_no_duplicates_gaps_or_overlaps() {
        let good = r#"{"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}"#;
        let of = |json: &str, data: u64| tensors(json.as_bytes(), 8 + json.len() as u64 + data);
        let found = of(good, 12).unwrap();
        let at = 8 + good.len() as u64;
        let entry = |name: &str, shape: &[usize], dtype, offset| TensorEntry {
            name: name.into(),
            shape: shape.into(),
            dtype,
            offset,
        };
        assert_eq!(found, [entry("a", &[2, 1], Dtype::F32, at), entry("b", &[2], Dtype::BF16, at + 8)]);
        assert!(refused(of(good, 11)).contains("is truncated"));
        assert!(refused(of(good, 13)).contains("extra bytes"));
        let bad = [
            (good.replace("\"b\"", "\"a\""), "a occurs twice"),
            (good.replace("[8,12]", "[4,8]"), "offset"),        // overlaps
            (good.replace("[8,12]", "[9,13]"), "offset"),       // leaves a gap
            (good.replace("[8,12]", "[12,8]"), "offset"),       // backwards
            (good.replace("[2,1]", "[2,2]"), "invalid header"), // 16 bytes in 8
            (good.replace("[2,1]", "[18446744073709551615,2]"), "verflow"),
            (good.replace("BF16", "BF17"), "BF17"),
            (good.replace("[2,1]", "[-2,1]"), "-2"),
            ("[]".into(), "object"),
            ("{".into(), "EOF"),
        ];
        for (json, says) in bad {
            let text = refused(of(&json, 12));
            assert!(text.contains(says), "{json}: {text}");
        }
        // Each size fits a machine word; their sum does not.
        let huge = |i: u64| {
            const BYTES: u64 = (1 << 61) - 8; // 64 bits less than a 64-bit count of bits can hold
            let (from, to) = (i * BYTES, (i + 1) * BYTES);
            format!(r#""t{i}":{{"dtype":"F4","shape":[{}],"data_offsets":[{from},{to}]}}"#, 2 * BYTES)
        };
        let json = format!("{{{}}}", (0..8).map(huge).collect::<Vec<_>>().join(","));
        assert!(refused(of(&json, 12)).contains("truncated"), "{json}");
    }

    #[test]
    fn an_index_stays_in_its_directory_and_has_no_duplicates() {
        let of = |map: &str| index(format!(r#"{{"metadata":{{"total_size":4}},"weight_map":{map}}}"#).as_bytes());
        for name in ["model-1.safetensors", "weights/model-1.safetensors"] {
            assert_eq!(of(&format!(r#"{{"a":"{name}"}}"#)).unwrap()["a"], name);
        }
        for name in ["", ".", "..", "../a", "a/../b", "/etc/passwd", "a//b", "a/", "a\\\\b", "a\\u0000", ".hidden"] {
            let text = refused(of(&format!(r#"{{"a":"{name}"}}"#)));
            assert!(text.contains("not a plain file name"), "{name}: {text}");
        }
        assert!(refused(of(r#"{"a":"x","a":"y"}"#)).contains("a occurs twice"));
        assert!(refused(of(r#"{"a":1}"#)).contains("tensor a is in 1"));
        assert!(refused(of("[]")).contains("not an index"));
        assert!(refused(index(br#"{"weight_maq":{}}"#)).contains("no weight_map"));
        assert!(refused(index(b"{")).contains("not an index"));
    }
}

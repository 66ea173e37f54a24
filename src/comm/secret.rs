//! The secret of a job: bytes that its ranks know and strangers do not. Never shown, neither in messages nor in
//! `Debug`.
use crate::base::{Error, Result, hex, open};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

/// Allowed size in bytes. An eavesdropper can test guesses offline against one greeting, so a short secret is useless.
const SIZES: std::ops::RangeInclusive<usize> = 16..=4096;
/// Size of a generated secret in bytes.
const MADE: usize = 32;

#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Generates a secret from the system's random generator.
    pub fn make() -> Result<Secret> {
        let bytes: [u8; MADE] =
            random().map_err(|e| Error::Run(format!("the system's random generator failed: {e}")))?;
        Ok(Secret(hex(&bytes).into()))
    }
    /// The secret in `text`, trimmed. `of` names its source in messages.
    pub fn new(text: &str, of: &str) -> Result<Secret> {
        let text = text.trim();
        if !SIZES.contains(&text.len()) {
            return Err(Error::input(format!(
                "{of} has {} bytes: a job secret needs {} to {}. Make one with `openssl rand -hex 32`",
                text.len(),
                SIZES.start(),
                SIZES.end()
            )));
        }
        Ok(Secret(text.into()))
    }
    /// Reads a secret. A file that is missing, or readable by every user of the host, is an input error.
    pub fn read(path: &Path) -> Result<Secret> {
        let of = format!("the job secret's file {}", path.display());
        let failed = |e| Error::input(format!("{of}: {e}"));
        let file = open::file(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(Error::input(format!(
                "{of} is accessible to every user (mode {mode:03o}): run chmod 600 on it"
            )));
        }
        let mut text = String::new();
        file.take(*SIZES.end() as u64 + 64).read_to_string(&mut text).map_err(failed)?;
        Secret::new(&text, &of)
    }
    /// The secret itself, to pass to other ranks or to hash; never to show.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Cryptographically random bytes.
pub fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    use rustix::rand::{GetRandomFlags, getrandom};
    let mut bytes = [0; N];
    let mut done = 0;
    while done < N {
        done += getrandom(&mut bytes[done..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};

    #[test]
    fn a_secret_is_made_of_enough_bytes_and_never_shown() {
        let (a, b) = (Secret::make().unwrap(), Secret::make().unwrap());
        assert!(a != b && a.reveal().len() == 2 * MADE);
        assert!(!format!("{a:?}").contains(&a.reveal()[..4]));
        assert_eq!(Secret::new(&format!(" {}\n", a.reveal()), "x").unwrap(), a);
        for bad in ["", "  \n", "fifteen letters", &"x".repeat(5000)] {
            let e = Secret::new(bad, "FLATSHARD_JOB_SECRET").unwrap_err();
            assert_eq!(e.exit_status(), 2);
            assert!(e.to_string().starts_with("FLATSHARD_JOB_SECRET has"), "{e}");
            assert!(bad.trim().is_empty() || !e.to_string().contains(bad.trim()), "{e}");
        }
    }

    #[test]
    fn a_file_of_a_secret_is_a_file_and_closed_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let refused = |says: &str| {
            let e = Secret::read(&path).unwrap_err();
            assert!(e.exit_status() == 2 && e.to_string().contains(says), "{e}");
        };
        refused("No such file");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        refused("is accessible to every user (mode 644): run chmod 600 on it");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert_eq!(Secret::read(&path).unwrap().reveal(), "0123456789abcdef");
        fs::write(&path, "short").unwrap();
        refused("has 5 bytes");
        fs::write(&path, [0xff; 40]).unwrap();
        refused("UTF-8");
        fs::write(&path, "x".repeat(1 << 20)).unwrap();
        refused("16 to 4096");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("not a regular file");
    }
}

//! The secret of a job: bytes that its ranks know and strangers do not. Never shown: not in messages, not in `Debug`.
use crate::base::{Error, Result, open};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a secret. Who hears one greeting can try guesses without asking anybody again, so a short one is none.
const SIZES: std::ops::RangeInclusive<usize> = 16..=4096;
/// Of one that is made here.
const MADE: usize = 32;

#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// From the system's generator.
    pub fn make() -> Result<Secret> {
        let bytes: [u8; MADE] = random().map_err(|e| Error::Run(format!("no random numbers from the system: {e}")))?;
        Ok(Secret(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()))
    }
    /// That which `of` (for messages) holds, without white space around it.
    pub fn new(text: &str, of: &str) -> Result<Secret> {
        let text = text.trim();
        if !SIZES.contains(&text.len()) {
            return Err(Error::input(format!(
                "{of} holds {} bytes: a job secret has {} to {}. Make one with `openssl rand -hex 32`",
                text.len(),
                SIZES.start(),
                SIZES.end()
            )));
        }
        Ok(Secret(text.into()))
    }
    /// An input error for a file that is none, or that every user of the host may read.
    pub fn read(path: &Path) -> Result<Secret> {
        let of = format!("the job secret's file {}", path.display());
        let failed = |e| Error::input(format!("{of}: {e}"));
        let file = open::file(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(Error::input(format!(
                "{of} is open to every user of this host (mode {mode:03o}): chmod 600 it"
            )));
        }
        let mut text = String::new();
        file.take(*SIZES.end() as u64 + 64).read_to_string(&mut text).map_err(failed)?;
        Secret::new(&text, &of)
    }
    /// To be passed on to other ranks, or hashed; never to be shown.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Bytes that nobody can guess.
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
            assert!(e.to_string().starts_with("FLATSHARD_JOB_SECRET holds"), "{e}");
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
        refused("is open to every user of this host (mode 644): chmod 600 it");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert_eq!(Secret::read(&path).unwrap().reveal(), "0123456789abcdef");
        fs::write(&path, "short").unwrap();
        refused("holds 5 bytes");
        fs::write(&path, [0xff; 40]).unwrap();
        refused("UTF-8");
        fs::write(&path, "x".repeat(1 << 20)).unwrap();
        refused("16 to 4096");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("not a regular file");
    }
}

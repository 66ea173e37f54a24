//! Messages on a connection: a header with kind, number and length, then that many bytes. Incoming headers are checked
//! against what is allowed before any byte is stored. Never waits.
use std::io::{Error, ErrorKind, Read, Result};

/// Bytes of a [`Header`].
pub const HEADER: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub kind: u32,
    /// Number of earlier messages on this connection in this direction.
    pub sequence: u32,
    /// Length of the body in bytes.
    pub len: u64,
}

impl Header {
    pub fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }
    /// `None` if there are too few bytes.
    pub fn parse(bytes: &[u8]) -> Option<Header> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let len = u64::from_le_bytes(bytes.get(8..HEADER)?.try_into().ok()?);
        Some(Header { kind: word(0)?, sequence: word(4)?, len })
    }
    /// The header followed by `body`.
    pub fn with(self, body: &[u8]) -> Vec<u8> {
        [&self.to_bytes()[..], body].concat()
    }
    /// Fails with the difference if this header is not the expected one.
    pub fn expect(&self, kind: u32, sequence: u32, len: u64) -> Result<()> {
        match *self == (Header { kind, sequence, len }) {
            true => Ok(()),
            false => Err(self.unexpected(&format!("expected number {sequence} of kind {kind} with {len} bytes"))),
        }
    }
    fn unexpected(&self, wanted: &str) -> Error {
        let Header { kind, sequence, len } = self;
        let what = format!("message {sequence} of kind {kind} with {len} bytes, {wanted}");
        Error::new(ErrorKind::InvalidData, what)
    }
}

/// What has arrived of the current message.
#[derive(Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// Number of complete messages.
    sequence: u32,
}

impl Inbox {
    /// Reads what is available. Returns the kind and body of a complete message, or `None` if more must arrive. `most`
    /// gives the maximum length per kind, or `None` for an unknown kind. Memory is allocated only for bytes that
    /// arrived, whatever the header claims.
    pub fn read(&mut self, from: &mut dyn Read, most: &dyn Fn(u32) -> Option<usize>) -> Result<Option<(u32, Vec<u8>)>> {
        loop {
            let header = Header::parse(&self.bytes);
            let wanted = match &header {
                None => HEADER,
                Some(header) => {
                    let len =
                        usize::try_from(header.len).ok().filter(|&len| most(header.kind).is_some_and(|m| len <= m));
                    match len {
                        Some(len) if header.sequence == self.sequence => HEADER + len,
                        _ => return Err(header.unexpected(&format!("expected number {}", self.sequence))),
                    }
                }
            };
            if let Some(header) = header.filter(|_| self.bytes.len() == wanted) {
                self.sequence = self.sequence.wrapping_add(1);
                let body = self.bytes.split_off(HEADER);
                self.bytes.clear();
                return Ok(Some((header.kind, body)));
            }
            let mut chunk = [0; 4096];
            let room = (wanted - self.bytes.len()).min(chunk.len());
            match from.read(&mut chunk[..room]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.bytes.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns at most `step` bytes per read, then would block.
    struct Slowly<'a>(&'a [u8], usize);
    impl Read for Slowly<'_> {
        fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
            let n = self.1.min(buf.len()).min(self.0.len());
            buf[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            if n == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(n) }
        }
    }
    fn most(kind: u32) -> Option<usize> {
        [0, 10, 9000].get(kind as usize).copied()
    }

    #[test]
    fn messages_come_whole_and_in_order_however_slowly() {
        let long: Vec<u8> = (0..9000).map(|i| i as u8).collect();
        let sent = [
            Header { kind: 1, sequence: 0, len: 3 }.with(b"abc"),
            Header { kind: 0, sequence: 1, len: 0 }.with(b""),
            Header { kind: 2, sequence: 2, len: 9000 }.with(&long),
        ];
        for step in [1, 7, 100_000] {
            let (bytes, mut inbox, mut got) = (sent.concat(), Inbox::default(), Vec::new());
            let mut from = Slowly(&bytes, step);
            while let Some(message) = inbox.read(&mut from, &most).unwrap() {
                got.push(message);
            }
            assert_eq!(got, [(1, b"abc".to_vec()), (0, vec![]), (2, long.clone())]);
        }
    }

    #[test]
    fn what_may_not_come_is_refused_before_room_is_taken_for_it() {
        let refused = |header: Header| {
            let (bytes, mut inbox) = (header.with(b"1234567890"), Inbox::default());
            let e = inbox.read(&mut Slowly(&bytes, 99), &most).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidData);
            assert!(inbox.bytes.capacity() < 8192);
        };
        refused(Header { kind: 1, sequence: 0, len: 11 });
        refused(Header { kind: 2, sequence: 0, len: u64::MAX });
        refused(Header { kind: 2, sequence: 0, len: 1 << 40 });
        refused(Header { kind: 3, sequence: 0, len: 1 });
        refused(Header { kind: 1, sequence: 1, len: 1 }); // one is missing, or was sent twice
        // A large allowed message allocates only as its bytes arrive.
        let (bytes, mut inbox) = (Header { kind: 2, sequence: 0, len: 9000 }.with(b"123"), Inbox::default());
        assert!(inbox.read(&mut Slowly(&bytes, 99), &most).unwrap().is_none());
        assert!(inbox.bytes.capacity() < 100);
        let e = Header { kind: 1, sequence: 4, len: 64 }.expect(1, 4, 128).unwrap_err().to_string();
        assert!(e.contains("message 4 of kind 1 with 64 bytes, expected number 4 of kind 1 with 128 bytes"), "{e}");
    }
}

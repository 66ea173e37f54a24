//! Frames between the ranks of a simulated world and its hub: a header of nine words, little-endian, and a body. Never
//! interprets them.
use std::io::{self, Read, Write};

/// Bytes that identify a world.
pub const KEY: usize = 16;

/// Messages between ranks and the hub.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum FrameKind {
    /// words: rank, size, the GPU; body: the world's key, the host's name.
    Hello = 1,
    /// words: color, key.
    Split,
    /// This rank's part of a collective; words: operation, dtype, reduction, root, count.
    Part,
    /// For one rank; words: receiver, its number, dtype, count.
    Post,
    /// This rank has destroyed the communicator.
    End,
    /// words: communicator, rank, size.
    Ready,
    /// A collective's result.
    Done,
    /// From one rank; words: sender, its number, dtype, count.
    Mail,
    /// This rank's call to register a window; words: bytes, flags.
    Window,
    /// words: an NCCL result; body: the reason.
    Wrong,
    /// words: the rank whose process has exited.
    Lost,
}

const KINDS: [FrameKind; 11] = {
    use FrameKind::*;
    [Hello, Split, Part, Post, End, Ready, Done, Mail, Window, Wrong, Lost]
};

#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: FrameKind,
    pub comm: u64,
    /// Number among the communicator's collectives, the same on every rank.
    pub seq: u64,
    pub words: [u64; 5],
    pub body: Vec<u8>,
}

impl Frame {
    pub fn new(kind: FrameKind, comm: u64, seq: u64, words: [u64; 5], body: Vec<u8>) -> Frame {
        Frame { kind, comm, seq, words, body }
    }
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let [a, b, c, d, e] = self.words;
        let head = [self.kind as u64, self.comm, self.seq, a, b, c, d, e, self.body.len() as u64];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(&self.body);
        to.write_all(&bytes)
    }
    pub fn read(from: &mut impl Read) -> io::Result<Frame> {
        let mut head = [0; 72];
        from.read_exact(&mut head)?;
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|byte| head[8 * i + byte]));
        let kind = KINDS.into_iter().find(|kind| *kind as u64 == word(0));
        let kind = kind.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not a frame"))?;
        let mut body = vec![0; word(8) as usize];
        from.read_exact(&mut body)?;
        Ok(Frame { kind, comm: word(1), seq: word(2), words: std::array::from_fn(|i| word(3 + i)), body })
    }
}

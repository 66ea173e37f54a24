//! All-gathers of a few numbers, and agreement that all ranks succeeded, outside of steps. Never used inside one.
use super::{Collective, CommUse, Tag};
use crate::base::{Category, DType, Error, Result, printable};
use crate::device::{Buf, Device};
use std::sync::Arc;

/// Status for "the checkpoint is damaged".
const DAMAGED: u64 = u64::MAX;

/// All-gathers numbers through a group.
pub struct Exchange {
    group: Arc<dyn Collective>,
    /// Used in errors and traces.
    purpose: &'static str,
    mine: Buf,
    all: Buf,
    bytes: Vec<u8>,
}

impl Exchange {
    /// Size of one rank's message.
    pub const fn bytes(words: usize) -> usize {
        words * size_of::<u64>()
    }
    /// For up to `words` numbers per rank.
    pub fn new(dev: &dyn Device, group: Arc<dyn Collective>, purpose: &'static str, words: usize) -> Result<Exchange> {
        let bytes = Exchange::bytes(words);
        let mine = dev.alloc(DType::U8, bytes, Category::Other)?;
        let all = group.alloc(DType::U8, bytes * group.size(), CommUse::Gathered, Category::Other)?;
        Ok(Exchange { bytes: vec![0; bytes * group.size()], group, purpose, mine, all })
    }

    pub fn rank(&self) -> usize {
        self.group.rank()
    }
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Every rank's numbers in rank order. Each rank passes the same count.
    pub fn gather(&mut self, dev: &dyn Device, words: &[u64]) -> Result<Vec<u64>> {
        let len = self.mine.len();
        self.bytes[..len].fill(0);
        for (to, word) in self.bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        dev.upload(&self.bytes[..len], self.mine.view_mut())?;
        let ticket = self.group.all_gather(Tag::new(self.purpose, 0), self.mine.view(), self.all.view_mut())?;
        self.group.wait(ticket)?;
        dev.download(self.all.view(), &mut self.bytes)?;
        self.group.release(ticket)?;
        let word = |b: &[u8]| b.iter().rev().fold(0, |word, byte| word << 8 | *byte as u64);
        let of_rank =
            |bytes: &[u8]| bytes.chunks_exact(size_of::<u64>()).take(words.len()).map(word).collect::<Vec<_>>();
        Ok(self.bytes.chunks_exact(len).flat_map(of_rank).collect())
    }

    /// Returns `mine` if all ranks succeeded. Otherwise every rank gets an error: its own, or one that names the rank
    /// that failed, or the signal that it received.
    pub fn agree<T>(&mut self, dev: &dyn Device, what: &str, mine: Result<T>) -> Result<T> {
        let (done, value) = match mine {
            Ok(value) => (Ok(Vec::new()), Some(value)),
            Err(error) => (Err(error), None),
        };
        self.share(dev, what, done, 0)?;
        value.ok_or_else(|| Error::op(self.purpose, "agreement without a value"))
    }

    /// Like [`Exchange::agree`]; returns every rank's `words` numbers in rank order.
    pub fn share(
        &mut self,
        dev: &dyn Device,
        what: &str,
        mine: Result<Vec<u64>>,
        words: usize,
    ) -> Result<Vec<Vec<u64>>> {
        let mut sent = vec![0; 1 + words];
        match &mine {
            Ok(found) => sent[1..].copy_from_slice(found),
            Err(Error::Damaged(_)) => sent[0] = DAMAGED,
            Err(error) => sent[0] = error.exit_status() as u64,
        }
        let all = self.gather(dev, &sent);
        mine?; // own error first: peers may already have left because of it
        let all = all?;
        let ranks = all.chunks_exact(sent.len());
        let Some((rank, failed)) = ranks.clone().enumerate().find(|(_, r)| r[0] != 0) else {
            return Ok(ranks.map(|r| r[1..].to_vec()).collect());
        };
        let text = format!("rank {rank} could not {what}; see its own message");
        Err(match failed[0] {
            DAMAGED => Error::Damaged(text),
            2 => Error::Input(text),
            stopped @ 129..=159 => Error::Signal(stopped as i32 - 128),
            _ => Error::Run(text),
        })
    }
}

/// Maximum bytes of a text that ranks exchange: more than any configuration has.
const TEXT: u64 = 16 << 20;

/// Every rank's text in rank order, sanitized for messages. Frees its buffers.
pub fn texts(dev: &dyn Device, group: &Arc<dyn Collective>, purpose: &'static str, mine: &str) -> Result<Vec<String>> {
    let lens = Exchange::new(dev, group.clone(), purpose, 1)?.gather(dev, &[mine.len() as u64])?;
    if let Some((rank, len)) = lens.iter().enumerate().find(|(_, len)| **len > TEXT) {
        return Err(Error::op(purpose, format!("rank {rank} sent a text of {len} bytes; the limit is {TEXT}")));
    }
    let words = lens.iter().max().map_or(0, |&len| (len as usize).div_ceil(size_of::<u64>()));
    let mut padded = mine.as_bytes().to_vec();
    padded.resize(words * size_of::<u64>(), 0);
    let word = |b: &[u8]| b.iter().rev().fold(0, |word, byte| word << 8 | *byte as u64);
    let mine: Vec<u64> = padded.chunks_exact(size_of::<u64>()).map(word).collect();
    let all = Exchange::new(dev, group.clone(), purpose, words)?.gather(dev, &mine)?;
    let text = |(words, len): (&[u64], &u64)| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take(*len as usize).collect();
        printable(&String::from_utf8_lossy(&bytes), TEXT as usize)
    };
    Ok(all.chunks_exact(words.max(1)).zip(&lens).map(text).collect())
}

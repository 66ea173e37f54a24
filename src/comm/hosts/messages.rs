//! The messages that ranks of several hosts exchange over TCP: addresses, refusals, losses. Parsing accepts any bytes.
//! Never communicates.
use super::roster::{PLACE, RankPlace};
use super::wire::Lost;
use crate::base::printable;
use std::net::{IpAddr, Ipv6Addr};

/// Kinds of messages. Rank 0's answer to all ranks: everyone's address, or why there is none.
pub const TABLE: u32 = 1;
pub const REFUSAL: u32 = 2;
/// A rank is lost; the sender is leaving.
pub const LOSS: u32 = 3;
pub const FAREWELL: u32 = 4;
/// Data of an operation.
pub const DATA: u32 = 5;

/// Bytes of the record that a rank sends to rank 0 (its place and port), and of the table entry that adds its address.
pub const RECORD: usize = PLACE + 2;
pub const ENTRY: usize = RECORD + 16;
/// Maximum bytes of a refusal's text, and of the reason of a loss.
pub const TEXT: usize = 4096;
const WHY: usize = 250;

/// A rank in rank 0's table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableEntry {
    pub place: RankPlace,
    /// Port that it listens on.
    pub port: u16,
    /// Its address as seen by rank 0; `None` for rank 0 itself.
    pub ip: Option<IpAddr>,
}

/// The record that a rank sends to rank 0.
pub fn record(place: &RankPlace, port: u16) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..PLACE].copy_from_slice(&place.to_bytes());
    record[PLACE..].copy_from_slice(&port.to_le_bytes());
    record
}
/// The table entry of a record.
pub fn entry(record: &[u8], ip: Option<IpAddr>) -> Vec<u8> {
    let ip = match ip {
        None => Ipv6Addr::UNSPECIFIED,
        Some(IpAddr::V4(ip)) => ip.to_ipv6_mapped(),
        Some(IpAddr::V6(ip)) => ip,
    };
    [record, &ip.octets()].concat()
}

/// Parses a table of `world` ranks.
pub fn table(bytes: &[u8], world: usize) -> Option<Vec<TableEntry>> {
    let (entries, rest) = bytes.as_chunks::<ENTRY>();
    let one = |bytes: &[u8; ENTRY]| {
        let (place, rest) = bytes.split_first_chunk::<PLACE>()?;
        let (port, ip) = rest.split_first_chunk()?;
        let ip = Ipv6Addr::from(<[u8; 16]>::try_from(ip).ok()?).to_canonical();
        Some(TableEntry {
            place: RankPlace::from_bytes(place),
            port: u16::from_le_bytes(*port),
            ip: Some(ip).filter(|ip| !ip.is_unspecified()),
        })
    };
    (entries.len() == world && rest.is_empty()).then(|| entries.iter().map(one).collect())?
}

/// Rank 0's text, sanitized for a terminal.
pub fn refusal(bytes: &[u8]) -> String {
    printable(&String::from_utf8_lossy(bytes), TEXT)
}

pub fn loss(lost: &Lost) -> Vec<u8> {
    let why = lost.why.as_bytes();
    [&(lost.rank as u32).to_le_bytes()[..], &why[..why.len().min(WHY)]].concat()
}
/// Parses a loss in a world of that many ranks.
pub fn lost(bytes: &[u8], world: usize) -> Option<Lost> {
    let (rank, why) = bytes.split_first_chunk()?;
    let rank = u32::from_le_bytes(*rank) as usize;
    (rank < world).then(|| Lost { rank, why: printable(&String::from_utf8_lossy(why), WHY) })
}

/// Maximum bytes per kind of message, for a rank that waits for rank 0's answer and for losses.
pub fn answers(world: usize) -> impl Fn(u32) -> Option<usize> {
    move |kind| match kind {
        TABLE => Some(world * ENTRY),
        REFUSAL => Some(TEXT),
        _ => None,
    }
}
pub fn max_len(kind: u32) -> Option<usize> {
    match kind {
        LOSS => Some(4 + WHY),
        FAREWELL => Some(0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let place = RankPlace { host: "node7".into(), local_rank: 1, local_world: 4 };
        let ips = [None, Some("10.0.0.7".parse().unwrap()), Some("fd00::7".parse().unwrap())];
        let bytes = ips.map(|ip| entry(&record(&place, 4711), ip)).concat();
        let parsed = table(&bytes, 3).unwrap();
        assert_eq!(parsed, ips.map(|ip| TableEntry { place: place.clone(), port: 4711, ip }));
        assert!(table(&bytes, 2).is_none() && table(&bytes[1..], 3).is_none() && table(&[], 3).is_none());
        let gone = Lost { rank: 2, why: "connection closed".into() };
        assert_eq!(lost(&loss(&gone), 3), Some(gone.clone()));
        assert!(lost(&loss(&gone), 2).is_none() && lost(&[1, 2, 3], 3).is_none());
    }

    #[test]
    fn a_peers_text_is_sanitized() {
        let wild = "\x1b]0;title\x07\x1b[2J\rerror: rank 0";
        let place = RankPlace { host: wild.into(), local_rank: 0, local_world: 1 };
        let parsed_host = table(&entry(&record(&place, 1), None), 1).unwrap().remove(0).place.host;
        let why = lost(&loss(&Lost { rank: 0, why: wild.repeat(20) }), 1).unwrap().why;
        for text in [parsed_host, why, refusal(wild.as_bytes())] {
            assert!(text.starts_with("\\u{1b}]0;title\\u{7}") && !text.contains(char::is_control), "{text}");
        }
    }
}

//! What an operation hands over from rank to rank, in bytes, and which part of that a round does. Never moves data.
use crate::base::DType;
use crate::device::gpu::Arg;

/// Bytes of half a stage. At 25 GB/s (PCIe 4) a round takes 170 us, several times what the host spends on it.
pub(super) const HALF: usize = 4 << 20;
/// What a copy or a kernel aligns to.
const ALIGNED: usize = 256;

/// Bytes of device memory.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(super) struct DeviceBytes {
    pub at: u64,
    pub bytes: usize,
}
impl DeviceBytes {
    pub fn of(arg: Option<&Arg>) -> (DeviceBytes, DType) {
        match arg {
            Some(Arg::In(view)) => (DeviceBytes { at: view.address() as u64, bytes: view.bytes() }, view.dtype()),
            Some(Arg::InOut(view) | Arg::Out(view)) => {
                let view = view.as_view();
                (DeviceBytes { at: view.address() as u64, bytes: view.bytes() }, view.dtype())
            }
            _ => (DeviceBytes::default(), DType::U8),
        }
    }
    /// The bytes from `start`, at most `most`: none beyond its end.
    pub fn cut(self, start: usize, most: usize) -> DeviceBytes {
        let start = start.min(self.bytes);
        DeviceBytes { at: self.at + start as u64, bytes: most.min(self.bytes - start) }
    }
    /// Elements `range` of that many bytes each.
    pub fn elements(self, range: &std::ops::Range<usize>, size: usize) -> DeviceBytes {
        DeviceBytes { at: self.at + (range.start * size) as u64, bytes: range.len() * size }
    }
    /// The part of `rank` among `ranks`: whole units of [`ALIGNED`] bytes, equal except for the last ones.
    pub fn slice(self, rank: usize, ranks: usize) -> DeviceBytes {
        let each = self.bytes.div_ceil(ranks).next_multiple_of(ALIGNED);
        self.cut(rank * each, each)
    }
}

/// What a rank hands over.
pub(super) enum HandOver {
    /// The same to all.
    One(DeviceBytes),
    /// To each rank its own.
    Each(Vec<DeviceBytes>),
}

/// One exchange among the ranks: what each gives, and where what it gets goes.
pub(super) struct IpcPass {
    pub given: HandOver,
    /// From each rank; the own part is copied too, unless it is there already.
    pub got: Vec<DeviceBytes>,
    /// What it gets is summed instead, next to each other; then addresses of `got` do not count.
    pub sums: bool,
}

impl IpcPass {
    /// Bytes for each reader in half a stage of `ranks` ranks.
    pub const fn cell(ranks: usize) -> usize {
        HALF / ranks / ALIGNED * ALIGNED
    }
    /// Bytes that a round moves from one rank to another.
    pub fn step(&self) -> usize {
        match self.given {
            HandOver::One(_) if !self.sums => HALF,
            _ => IpcPass::cell(self.got.len()),
        }
    }
    pub fn given_to(&self, rank: usize) -> DeviceBytes {
        match &self.given {
            HandOver::One(piece) => *piece,
            HandOver::Each(pieces) => pieces[rank],
        }
    }
    /// Where in a half the part of `rank` begins.
    pub fn offset(&self, rank: usize) -> usize {
        match self.given {
            HandOver::One(_) => 0,
            HandOver::Each(_) => rank * self.step(),
        }
    }
    /// Rounds until this rank has given and got everything: at least one, in which ranks compare what they do.
    pub fn rounds(&self) -> usize {
        let given = (0..self.got.len()).map(|rank| self.given_to(rank).bytes);
        let most = given.chain(self.got.iter().map(|piece| piece.bytes)).max();
        most.unwrap_or(0).div_ceil(self.step()).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_everything_once_and_the_last_ones_may_be_empty() {
        for (bytes, ranks) in [(0, 3), (4, 2), (1000, 3), (4099 * 4, 4), (257, 8)] {
            let whole = DeviceBytes { at: 4096, bytes };
            let slices: Vec<DeviceBytes> = (0..ranks).map(|rank| whole.slice(rank, ranks)).collect();
            let mut at = whole.at;
            for slice in slices.iter().filter(|slice| slice.bytes > 0) {
                assert_eq!(slice.at, at);
                at += slice.bytes as u64;
            }
            assert_eq!(at, whole.at + bytes as u64, "{bytes} over {ranks}");
        }
    }

    #[test]
    fn rounds_cover_the_longest_part_and_cells_fit_in_half_a_stage() {
        for ranks in [2, 3, 5, 8] {
            assert!(IpcPass::cell(ranks) * ranks <= HALF && IpcPass::cell(ranks).is_multiple_of(ALIGNED));
        }
        let piece = |bytes| DeviceBytes { at: 0, bytes };
        let of = |given, got: [usize; 2]| IpcPass { given, got: got.map(piece).to_vec(), sums: false }.rounds();
        assert_eq!(of(HandOver::One(piece(HALF)), [HALF, HALF]), 1);
        assert_eq!(of(HandOver::One(piece(HALF)), [HALF, HALF + 1]), 2);
        assert_eq!(of(HandOver::Each(vec![piece(0), piece(HALF)]), [0, 0]), 2);
        assert_eq!(of(HandOver::Each(vec![piece(0), piece(0)]), [0, 0]), 1);
    }
}

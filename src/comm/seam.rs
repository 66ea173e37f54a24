//! The calls of a `Collective`, as values: what a recorder writes down and where delays are injected.

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Seam {
    Alloc,
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
    SendRecv,
    Barrier,
    Wait,
    Release,
    WaitSent,
}

impl Seam {
    pub const ALL: [Seam; 10] = [
        Seam::Alloc,
        Seam::AllGather,
        Seam::ReduceScatter,
        Seam::AllReduce,
        Seam::Broadcast,
        Seam::SendRecv,
        Seam::Barrier,
        Seam::Wait,
        Seam::Release,
        Seam::WaitSent,
    ];
}

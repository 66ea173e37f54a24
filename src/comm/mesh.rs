//! The mesh: ranks arranged along axes, and this rank's group on each axis. Never communicates.
use super::{Axis, Collective, CommStats, Member};
use crate::base::{Error, Result};
use std::sync::Arc;

/// Number of ranks along each axis, outermost first: rank = ((dp_replicate * dp_shard + ...) * sp + ...) * tp + ...
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct MeshSizes {
    /// Replicas; each holds all parameters, in shards.
    pub dp_replicate: usize,
    /// Ranks that shard a replica's parameters and see different samples.
    pub dp_shard: usize,
    /// Ranks that share a sequence (context parallelism); parameters are sharded over them too.
    pub sp: usize,
    /// Ranks that share each matrix product (tensor parallelism).
    pub tp: usize,
    /// Ranks of dp_shard, next to each other, that share the experts of a mixture: dp_shard = (dp_shard / ep) x ep.
    /// Parameters of experts are sharded over dp_shard / ep x sp, all others over dp_shard x sp.
    pub ep: usize,
}

/// One rank: every size 1.
impl Default for MeshSizes {
    fn default() -> MeshSizes {
        MeshSizes::sharded(1)
    }
}

/// A rank's position along each axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coords {
    pub dp_replicate: usize,
    pub dp_shard: usize,
    pub sp: usize,
    pub tp: usize,
}

impl MeshSizes {
    /// All ranks along dp_shard.
    pub fn sharded(world: usize) -> MeshSizes {
        MeshSizes { dp_replicate: 1, dp_shard: world, sp: 1, tp: 1, ep: 1 }
    }
    pub fn world(&self) -> usize {
        self.dp_replicate * self.dp_shard * self.sp * self.tp
    }
    /// Number of ranks that parameters are sharded over.
    pub fn fsdp(&self) -> usize {
        self.dp_shard * self.sp
    }
    /// Checks that every size is at least 1, that the product is the number of ranks, and that ep divides dp_shard.
    pub fn check(&self, world: usize) -> Result<()> {
        let MeshSizes { dp_replicate, dp_shard, sp, tp, ep } = *self;
        if ep == 0 || !dp_shard.is_multiple_of(ep) {
            return Err(Error::input(format!(
                "ep {ep} does not divide dp_shard {dp_shard}, the ranks that shard a replica's parameters; choose an ep that \
                 divides it"
            )));
        }
        if self.world() == world && world > 0 {
            return Ok(());
        }
        Err(Error::input(format!(
            "dp_replicate {dp_replicate} x dp_shard {dp_shard} x sp {sp} x tp {tp} = {}, but there are {world} ranks; \
             their product must be the number of ranks",
            self.world()
        )))
    }
    /// Which of the ep ranks that share experts a rank is.
    pub fn ep_index(&self, at: &Coords) -> usize {
        at.dp_shard % self.ep
    }
    pub fn coords(&self, rank: usize) -> Coords {
        let (tp, rest) = (rank % self.tp, rank / self.tp);
        let (sp, rest) = (rest % self.sp, rest / self.sp);
        Coords { dp_replicate: rest / self.dp_shard, dp_shard: rest % self.dp_shard, sp, tp }
    }
    pub fn rank(&self, at: Coords) -> usize {
        ((at.dp_replicate * self.dp_shard + at.dp_shard) * self.sp + at.sp) * self.tp + at.tp
    }
    /// World ranks in `rank`'s group along `axis`: they differ from it along that axis only.
    pub fn group(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let values = |r: usize| {
            let at = self.coords(r);
            [at.dp_replicate, at.dp_shard / self.ep, self.ep_index(&at), at.sp, at.tp]
        };
        let mine = values(rank);
        let same = |&r: &usize| values(r).iter().zip(mine).zip(axis.along()).all(|((&a, b), along)| along || a == b);
        (0..self.world()).filter(same).collect()
    }
}

/// The groups of one rank.
#[derive(Clone)]
pub struct Mesh {
    pub sizes: MeshSizes,
    pub coords: Coords,
    /// Used to abort.
    pub member: Arc<dyn Member>,
    groups: [Arc<dyn Collective>; Axis::ALL.len()],
}

impl Mesh {
    pub fn new(member: impl Member + 'static, sizes: MeshSizes) -> Result<Mesh> {
        Mesh::with_world(Mesh::world(&member)?, Arc::new(member), sizes)
    }
    /// The group of all ranks. Created once, before the mesh, on whose shape ranks might disagree.
    pub fn world(member: &dyn Member) -> Result<Arc<dyn Collective>> {
        member.group(Axis::World, (0..member.size()).collect())
    }
    /// Like [`Mesh::new`], with `world` as the group of all ranks.
    pub fn with_world(world: Arc<dyn Collective>, member: Arc<dyn Member>, sizes: MeshSizes) -> Result<Mesh> {
        sizes.check(member.size())?;
        let rank = member.rank();
        let groups = Axis::ALL.map(|_| world.clone());
        let mut mesh = Mesh { sizes, coords: sizes.coords(rank), member, groups };
        for axis in mesh.axes().filter(|&axis| axis != Axis::World) {
            mesh.groups[axis as usize] = mesh.member.group(axis, sizes.group(axis, rank))?;
        }
        Ok(mesh.aliased())
    }
    pub fn rank(&self) -> usize {
        self.member.rank()
    }
    pub fn group(&self, axis: Axis) -> &Arc<dyn Collective> {
        &self.groups[axis as usize]
    }
    /// The axes that have a group of their own.
    pub fn axes(&self) -> impl Iterator<Item = Axis> + use<> {
        let apart = self.sizes.ep > 1;
        Axis::ALL.into_iter().filter(move |&axis| apart || axis != Axis::ExpertFsdp)
    }
    /// Without ep, experts are sharded as all else is.
    fn aliased(mut self) -> Mesh {
        if self.sizes.ep == 1 {
            self.groups[Axis::ExpertFsdp as usize] = self.group(Axis::Fsdp).clone();
        }
        self
    }
    /// The mesh as the store of the experts sees it.
    pub fn of_experts(&self) -> Mesh {
        let mut mesh = self.clone();
        mesh.groups[Axis::Fsdp as usize] = self.group(Axis::ExpertFsdp).clone();
        mesh
    }
    /// Totals of this rank's groups. Times are summed over groups, so overlapping operations both count.
    pub fn stats(&self) -> CommStats {
        self.axes().map(|axis| self.group(axis).stats()).fold(CommStats::default(), |sum, of| CommStats {
            in_flight_s: sum.in_flight_s + of.in_flight_s,
            exposed_s: sum.exposed_s + of.exposed_s,
            bytes: sum.bytes + of.bytes,
            ops: sum.ops + of.ops,
            crossed: sum.crossed + of.crossed,
        })
    }
    /// Wraps every group, e.g. in a recorder or delays.
    pub fn wrap(mut self, wrap: impl Fn(Arc<dyn Collective>) -> Arc<dyn Collective>) -> Mesh {
        for axis in self.axes() {
            let group = &mut self.groups[axis as usize];
            *group = wrap(group.clone());
        }
        self.aliased()
    }
}

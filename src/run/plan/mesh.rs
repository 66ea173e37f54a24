//! How many ranks there are and how they are arranged along the axes of the mesh. Never starts anything.
use crate::base::{Error, Result};
use crate::comm::mesh::MeshSizes;
use crate::run::plan::device;
use crate::run::settings::value::set;
use crate::run::settings::{DeviceName, Settings, ShardingName, StrategyName};

/// The mesh, and the number of its ranks on this host. `started`: world size and ranks on this host, if a launcher
/// started them.
pub fn sizes(s: &mut Settings, device: DeviceName, started: Option<(usize, usize)>) -> Result<(MeshSizes, usize)> {
    let (world, nproc) = ranks(s, device, started)?;
    let axes = MeshAxes {
        sharded: s.run.strategy != Some(StrategyName::Ddp),
        hybrid: s.fsdp.sharding == Some(ShardingName::HybridShard),
        replicas: s.parallel.dp_replicate_size,
        sp: set(&s.parallel.ring_attn_size, "ring_attn_size")?,
        tp: set(&s.parallel.tp_size, "tp_size")?,
        ep: set(&s.parallel.ep_size, "ep_size")?,
    };
    let sizes = axes.arrange(world, nproc)?;
    (s.run.nproc_per_node, s.run.num_nodes) = (Some(nproc), Some(world / nproc));
    Ok((sizes, nproc))
}

/// World size and ranks on this host.
fn ranks(s: &Settings, device: DeviceName, started: Option<(usize, usize)>) -> Result<(usize, usize)> {
    let nodes = set(&s.run.num_nodes, "run.num_nodes")?;
    let (world, nproc) = match started {
        Some((world, local)) => {
            if let Some(n) = s.run.nproc_per_node.filter(|&n| n != local) {
                return Err(Error::input(format!(
                    "nproc_per_node {n}, but the launcher started {local} ranks on this host: remove the flag, or start {n}"
                )));
            }
            let hosts = world / local;
            if nodes != 1 && nodes != hosts {
                return Err(Error::input(format!(
                    "num_nodes {nodes}, but the launcher started {world} ranks on {hosts} hosts ({local} on each): remove the flag"
                )));
            }
            (world, local)
        }
        None => {
            let nproc = match s.run.nproc_per_node {
                Some(n) => n,
                None => device::ranks(device, set(&s.run.ranks_per_gpu, "run.ranks_per_gpu")?)?,
            };
            if nodes > 1 {
                return Err(Error::input(format!(
                    "num_nodes {nodes}: this binary starts ranks on one host only. Start it on each host with torchrun \
                     (torchrun --nnodes {nodes} --nproc-per-node {nproc} --no-python ...), srun or mpirun"
                )));
            }
            (nproc, nproc)
        }
    };
    Ok((world, nproc))
}

/// Axes as the settings give them. The remaining ranks shard the parameters.
#[derive(Clone, Copy)]
struct MeshAxes {
    sharded: bool,
    hybrid: bool,
    /// dp_replicate, if given.
    replicas: Option<usize>,
    sp: usize,
    tp: usize,
    ep: usize,
}

impl MeshAxes {
    /// Default replicas: DDP has nothing but replicas; HYBRID_SHARD has one per host, so that shards are gathered
    /// within hosts and only gradient sums cross them (on one host that is FULL_SHARD); everything else has one.
    fn arrange(self, world: usize, nproc: usize) -> Result<MeshSizes> {
        let MeshAxes { sharded, hybrid, replicas, sp, tp, ep } = self;
        let default = match (sharded, hybrid) {
            (false, _) => world / (sp * tp),
            (true, true) => world / nproc,
            (true, false) => 1,
        };
        let dp_replicate = replicas.unwrap_or(default).max(1);
        let dp_shard = if sharded { (world / (dp_replicate * sp * tp)).max(1) } else { 1 };
        let sizes = MeshSizes { dp_replicate, dp_shard, sp, tp, ep };
        sizes.check(world)?;
        Ok(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: MeshAxes = MeshAxes { sharded: true, hybrid: false, replicas: None, sp: 1, tp: 1, ep: 1 };
    const HYBRID: MeshAxes = MeshAxes { hybrid: true, ..FULL };
    const DDP: MeshAxes = MeshAxes { sharded: false, ..FULL };

    fn axes(given: MeshAxes, world: usize, nproc: usize) -> [usize; 4] {
        let MeshSizes { dp_replicate, dp_shard, sp, tp, .. } = given.arrange(world, nproc).unwrap();
        [dp_replicate, dp_shard, sp, tp]
    }

    #[test]
    fn remaining_ranks_shard() {
        assert_eq!(axes(FULL, 8, 8), [1, 8, 1, 1]);
        assert_eq!(axes(MeshAxes { replicas: Some(2), ..FULL }, 8, 8), [2, 4, 1, 1]);
        assert_eq!(axes(MeshAxes { replicas: Some(2), sp: 2, tp: 2, ..FULL }, 8, 8), [2, 1, 2, 2]);
        assert_eq!(axes(DDP, 8, 8), [8, 1, 1, 1]);
        assert_eq!(axes(MeshAxes { sp: 2, tp: 2, ..DDP }, 8, 8), [2, 1, 2, 2]);
    }

    #[test]
    fn hybrid_shards_inside_a_host() {
        assert_eq!(axes(HYBRID, 32, 8), [4, 8, 1, 1]);
        assert_eq!(axes(HYBRID, 8, 8), [1, 8, 1, 1]); // one host: one replica
        assert_eq!(axes(MeshAxes { tp: 4, ..HYBRID }, 16, 8), [2, 2, 1, 4]);
        assert_eq!(axes(MeshAxes { replicas: Some(2), ..HYBRID }, 32, 8), [2, 16, 1, 1]);
    }

    #[test]
    fn a_product_that_is_not_the_number_of_ranks_is_refused_with_the_equation() {
        let refused = |given: MeshAxes, says: &str| {
            let error = given.arrange(8, 8).unwrap_err();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains(says), "{error}");
        };
        refused(
            MeshAxes { replicas: Some(3), ..FULL },
            "dp_replicate 3 x dp_shard 2 x sp 1 x tp 1 = 6, but there are 8",
        );
        refused(
            MeshAxes { replicas: Some(16), ..FULL },
            "dp_replicate 16 x dp_shard 1 x sp 1 x tp 1 = 16, but there are 8",
        );
        refused(MeshAxes { sp: 3, ..FULL }, "dp_replicate 1 x dp_shard 2 x sp 3 x tp 1 = 6, but there are 8");
        refused(MeshAxes { tp: 16, ..DDP }, "dp_replicate 1 x dp_shard 1 x sp 1 x tp 16 = 16, but there are 8");
        refused(MeshAxes { ep: 3, ..FULL }, "ep 3 does not divide dp_shard 8");
        refused(MeshAxes { ep: 2, ..DDP }, "ep 2 does not divide dp_shard 1");
        refused(
            MeshAxes { replicas: Some(4), ..DDP },
            "dp_replicate 4 x dp_shard 1 x sp 1 x tp 1 = 4, but there are 8",
        );
    }
}

//! How many ranks there are and how they are arranged along the axes of the mesh. Never starts anything.
use crate::base::{Error, Result};
use crate::comm::mesh::MeshSizes;
use crate::run::plan::device;
use crate::run::settings::value::set;
use crate::run::settings::{DeviceName, Settings, ShardingName, StrategyName};

/// The mesh, and how many of its ranks are on this host. `started`: ranks of the job and of this host, where a launcher
/// has started them.
pub fn sizes(s: &mut Settings, device: DeviceName, started: Option<(usize, usize)>) -> Result<(MeshSizes, usize)> {
    let (world, nproc) = ranks(s, device, started)?;
    let asked = AskedAxes {
        sharded: s.run.strategy != Some(StrategyName::Ddp),
        hybrid: s.fsdp.sharding == Some(ShardingName::HybridShard),
        replicas: s.parallel.dp_replicate_size,
        sp: set(&s.parallel.ring_attn_size, "ring_attn_size")?,
        tp: set(&s.parallel.tp_size, "tp_size")?,
    };
    let sizes = asked.arrange(world, nproc)?;
    (s.run.nproc_per_node, s.run.num_nodes) = (Some(nproc), Some(world / nproc));
    Ok((sizes, nproc))
}

/// Of the whole job, and of this host.
fn ranks(s: &Settings, device: DeviceName, started: Option<(usize, usize)>) -> Result<(usize, usize)> {
    let nodes = set(&s.run.num_nodes, "run.num_nodes")?;
    let (world, nproc) = match started {
        Some((world, local)) => {
            if let Some(n) = s.run.nproc_per_node.filter(|&n| n != local) {
                return Err(Error::input(format!(
                    "nproc_per_node {n}, but the launcher started {local} ranks on this host: leave the flag out, or start {n}"
                )));
            }
            let hosts = world / local;
            if nodes != 1 && nodes != hosts {
                return Err(Error::input(format!(
                    "num_nodes {nodes}, but the launcher started ranks on {hosts} hosts ({world} ranks, {local} on each): leave the flag out"
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
                    "a job of {nodes} hosts is started by torchrun, srun or mpirun on each of them (torchrun --nnodes {nodes} \
                     --nproc-per-node {nproc} --no-python ...); started plainly, this binary starts ranks on this host only"
                )));
            }
            (nproc, nproc)
        }
    };
    Ok((world, nproc))
}

/// What the settings say of the axes. Whatever is left of the ranks shards the parameters.
#[derive(Clone, Copy)]
struct AskedAxes {
    sharded: bool,
    hybrid: bool,
    /// dp_replicate, where it is given.
    replicas: Option<usize>,
    sp: usize,
    tp: usize,
}

impl AskedAxes {
    /// Replicas that nobody asked for: DDP has nothing else; HYBRID_SHARD has one a host, so that shards travel inside
    /// hosts and only their sums between them (on one host that is FULL_SHARD); everything else has one.
    fn arrange(self, world: usize, nproc: usize) -> Result<MeshSizes> {
        let AskedAxes { sharded, hybrid, replicas, sp, tp } = self;
        let default = match (sharded, hybrid) {
            (false, _) => world / (sp * tp),
            (true, true) => world / nproc,
            (true, false) => 1,
        };
        let dp_replicate = replicas.unwrap_or(default).max(1);
        let dp_shard = if sharded { (world / (dp_replicate * sp * tp)).max(1) } else { 1 };
        let sizes = MeshSizes { dp_replicate, dp_shard, sp, tp };
        sizes.check(world)?;
        Ok(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: AskedAxes = AskedAxes { sharded: true, hybrid: false, replicas: None, sp: 1, tp: 1 };
    const HYBRID: AskedAxes = AskedAxes { hybrid: true, ..FULL };
    const DDP: AskedAxes = AskedAxes { sharded: false, ..FULL };

    fn axes(asked: AskedAxes, world: usize, nproc: usize) -> [usize; 4] {
        let MeshSizes { dp_replicate, dp_shard, sp, tp } = asked.arrange(world, nproc).unwrap();
        [dp_replicate, dp_shard, sp, tp]
    }

    #[test]
    fn what_is_left_shards() {
        assert_eq!(axes(FULL, 8, 8), [1, 8, 1, 1]);
        assert_eq!(axes(AskedAxes { replicas: Some(2), ..FULL }, 8, 8), [2, 4, 1, 1]);
        assert_eq!(axes(AskedAxes { replicas: Some(2), sp: 2, tp: 2, ..FULL }, 8, 8), [2, 1, 2, 2]);
        assert_eq!(axes(DDP, 8, 8), [8, 1, 1, 1]);
        assert_eq!(axes(AskedAxes { sp: 2, tp: 2, ..DDP }, 8, 8), [2, 1, 2, 2]);
    }

    #[test]
    fn hybrid_shards_inside_a_host() {
        assert_eq!(axes(HYBRID, 32, 8), [4, 8, 1, 1]);
        assert_eq!(axes(HYBRID, 8, 8), [1, 8, 1, 1]); // one host: one replica
        assert_eq!(axes(AskedAxes { tp: 4, ..HYBRID }, 16, 8), [2, 2, 1, 4]);
        assert_eq!(axes(AskedAxes { replicas: Some(2), ..HYBRID }, 32, 8), [2, 16, 1, 1]);
    }

    #[test]
    fn a_product_that_is_not_the_number_of_ranks_is_refused_with_the_equation() {
        let refused = |asked: AskedAxes, says: &str| {
            let error = asked.arrange(8, 8).unwrap_err();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains(says), "{error}");
        };
        refused(
            AskedAxes { replicas: Some(3), ..FULL },
            "dp_replicate 3 x dp_shard 2 x sp 1 x tp 1 = 6, but there are 8",
        );
        refused(
            AskedAxes { replicas: Some(16), ..FULL },
            "dp_replicate 16 x dp_shard 1 x sp 1 x tp 1 = 16, but there are 8",
        );
        refused(AskedAxes { sp: 3, ..FULL }, "dp_replicate 1 x dp_shard 2 x sp 3 x tp 1 = 6, but there are 8");
        refused(AskedAxes { tp: 16, ..DDP }, "dp_replicate 1 x dp_shard 1 x sp 1 x tp 16 = 16, but there are 8");
        refused(
            AskedAxes { replicas: Some(4), ..DDP },
            "dp_replicate 4 x dp_shard 1 x sp 1 x tp 1 = 4, but there are 8",
        );
    }
}

//! How many ranks there are and how they are arranged along the axes of the mesh. Never starts anything.
use crate::base::{Error, Result};
use crate::comm::env::RankEnv;
use crate::comm::mesh::MeshSizes;
use crate::run::launch::device;
use crate::run::plan::derive::set;
use crate::run::settings::*;

/// The mesh, and how many of its ranks are on this host.
pub fn sizes(
    s: &mut Settings,
    strategy: StrategyName,
    device: DeviceName,
    launched: Option<&RankEnv>,
) -> Result<(MeshSizes, usize)> {
    let (world, nproc) = ranks(s, device, launched)?;
    let hybrid = s.fsdp.sharding == Some(ShardingName::HybridShard);
    if hybrid && strategy == StrategyName::Ddp {
        return Err(Error::input(
            "--sharding HYBRID_SHARD cuts parameters over ranks, which DDP does not: use run_fsdp, or leave the flag out",
        ));
    }
    let asked = Asked {
        sharded: strategy != StrategyName::Ddp,
        hybrid,
        replicas: s.parallel.dp_replicate_size,
        sp: set(&s.parallel.ring_attn_size, "ring_attn_size")?,
        tp: set(&s.parallel.tp_size, "tp_size")?,
    };
    let sizes = asked.arrange(world, nproc)?;
    (s.run.nproc_per_node, s.run.num_nodes) = (Some(nproc), Some(world / nproc));
    Ok((sizes, nproc))
}

/// Of the whole job, and of this host.
fn ranks(s: &Settings, device: DeviceName, launched: Option<&RankEnv>) -> Result<(usize, usize)> {
    let nodes = set(&s.run.num_nodes, "run.num_nodes")?;
    let (world, nproc) = match launched {
        Some(env) => {
            if let Some(n) = s.run.nproc_per_node.filter(|&n| n != env.local_world) {
                return Err(Error::input(format!(
                    "nproc_per_node {n}, but the launcher started {} ranks on this host: leave the flag out, or start {n}",
                    env.local_world
                )));
            }
            let hosts = env.world / env.local_world;
            if nodes != 1 && nodes != hosts {
                return Err(Error::input(format!(
                    "num_nodes {nodes}, but the launcher started ranks on {hosts} hosts ({} ranks, {} on each): leave the flag out",
                    env.world, env.local_world
                )));
            }
            (env.world, env.local_world)
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
struct Asked {
    sharded: bool,
    hybrid: bool,
    /// dp_replicate, where it is given.
    replicas: Option<usize>,
    sp: usize,
    tp: usize,
}

impl Asked {
    /// Replicas that nobody asked for: DDP has nothing else; HYBRID_SHARD has one a host, so that shards travel inside
    /// hosts and only their sums between them (on one host that is FULL_SHARD); everything else has one.
    fn arrange(self, world: usize, nproc: usize) -> Result<MeshSizes> {
        let Asked { sharded, hybrid, replicas, sp, tp } = self;
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

    const FULL: Asked = Asked { sharded: true, hybrid: false, replicas: None, sp: 1, tp: 1 };
    const HYBRID: Asked = Asked { hybrid: true, ..FULL };
    const DDP: Asked = Asked { sharded: false, ..FULL };

    fn axes(asked: Asked, world: usize, nproc: usize) -> [usize; 4] {
        let MeshSizes { dp_replicate, dp_shard, sp, tp } = asked.arrange(world, nproc).unwrap();
        [dp_replicate, dp_shard, sp, tp]
    }

    #[test]
    fn what_is_left_shards() {
        assert_eq!(axes(FULL, 8, 8), [1, 8, 1, 1]);
        assert_eq!(axes(Asked { replicas: Some(2), ..FULL }, 8, 8), [2, 4, 1, 1]);
        assert_eq!(axes(Asked { replicas: Some(2), sp: 2, tp: 2, ..FULL }, 8, 8), [2, 1, 2, 2]);
        assert_eq!(axes(DDP, 8, 8), [8, 1, 1, 1]);
        assert_eq!(axes(Asked { sp: 2, tp: 2, ..DDP }, 8, 8), [2, 1, 2, 2]);
    }

    #[test]
    fn hybrid_shards_inside_a_host() {
        assert_eq!(axes(HYBRID, 32, 8), [4, 8, 1, 1]);
        assert_eq!(axes(HYBRID, 8, 8), [1, 8, 1, 1]); // one host: one replica
        assert_eq!(axes(Asked { tp: 4, ..HYBRID }, 16, 8), [2, 2, 1, 4]);
        assert_eq!(axes(Asked { replicas: Some(2), ..HYBRID }, 32, 8), [2, 16, 1, 1]);
    }

    #[test]
    fn a_product_that_is_not_the_number_of_ranks_is_refused_with_the_equation() {
        let refused = |asked: Asked, says: &str| {
            let error = asked.arrange(8, 8).unwrap_err();
            assert_eq!(error.exit_status(), 2);
            assert!(error.to_string().contains(says), "{error}");
        };
        refused(Asked { replicas: Some(3), ..FULL }, "dp_replicate 3 x dp_shard 2 x sp 1 x tp 1 = 6, but there are 8");
        refused(
            Asked { replicas: Some(16), ..FULL },
            "dp_replicate 16 x dp_shard 1 x sp 1 x tp 1 = 16, but there are 8",
        );
        refused(Asked { sp: 3, ..FULL }, "dp_replicate 1 x dp_shard 2 x sp 3 x tp 1 = 6, but there are 8");
        refused(Asked { tp: 16, ..DDP }, "dp_replicate 1 x dp_shard 1 x sp 1 x tp 16 = 16, but there are 8");
        refused(Asked { replicas: Some(4), ..DDP }, "dp_replicate 4 x dp_shard 1 x sp 1 x tp 1 = 4, but there are 8");
    }
}

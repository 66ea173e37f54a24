//! What a run would be: settings made into a mesh, an engine and the bytes of a rank, for any number of ranks of any device. Needs
//! no data, starts nothing and writes nothing: what a planner asks.
use crate::base::{Category, Result};
use crate::comm::env::RankEnv;
use crate::comm::mesh::MeshSizes;
use crate::engine::EngineOptions;
use crate::nn::Segment;
use crate::run::plan::bytes;
use crate::run::plan::check;
use crate::run::plan::derive;
use crate::run::plan::knobs;
use crate::run::plan::mesh;
use crate::run::plan::tensor;
use crate::run::settings::DeviceName;
use crate::run::settings::Settings;
use crate::run::settings::StrategyName;

pub struct Outline {
    /// With the derived values filled in.
    pub settings: Settings,
    pub mesh: MeshSizes,
    pub engine: EngineOptions,
    pub params: usize,
    /// Of one rank, in the order of [`crate::base::CATEGORIES`]; on GPUs without what the device itself holds.
    pub planned: Vec<(Category, usize)>,
    /// Tokens of a sequence, sequences of a micro-batch, micro-batches of a step.
    pub work: [usize; 3],
}

impl Outline {
    /// Of `world` ranks, `per_node` of them on a host; `default` is what the binary is for. The errors are those of a run.
    pub fn new(
        mut s: Settings,
        default: StrategyName,
        device: DeviceName,
        world: usize,
        per_node: usize,
    ) -> Result<Outline> {
        check::numbers(&s)?;
        let save = derive::save(&s.checkpoint)?;
        let strategy = derive::strategy(&mut s, default);
        let launched = RankEnv {
            rank: 0,
            world,
            local_rank: 0,
            local_world: per_node.min(world),
            host: String::new(),
            master_addr: String::new(),
            master_port: 0,
            run_id: String::new(),
            arena_fd: None,
            parent_pid: None,
            restart: None,
            secret: None,
            mpi: false,
        };
        s.run.nproc_per_node = None; // the launcher's
        knobs::check(&s, strategy)?;
        let (mesh, _) = mesh::sizes(&mut s, strategy, device, Some(&launched))?;
        let tokenizer = derive::tokenizer(&mut s)?;
        let spec = derive::spec(&mut s, &tokenizer)?;
        let mut engine = derive::engine(&s, strategy, device, spec)?;
        tensor::settle(&s, &mesh, &mut engine)?;
        let params = engine.spec.layouts().iter().flat_map(|l| &l.segments).map(Segment::len).sum();
        let planned = bytes::of_training(&engine, &mesh, save.behind, device, per_node)?;
        let work = [
            derive::set(&s.data.max_len, "data.max_len")?,
            derive::set(&s.batch.batch_size, "batch.batch_size")?,
            derive::set(&s.batch.grad_accum, "batch.grad_accum")?,
        ];
        Ok(Outline { settings: s, mesh, engine, params, planned, work })
    }
}

//! A rank's identity from its launcher's variables, passed in as values. Never reads the environment itself:
//! [`super::env`] does.
use super::nodelist;
use super::secret::Secret;
use crate::base::{Error, Result};
use std::os::fd::RawFd;

/// Set by our own launcher: the descriptor of the shared-memory arena, which ranks inherit.
pub const ARENA_FD: &str = "FLATSHARD_ARENA_FD";
/// Set by our own launcher: its process id. No rank outlives it.
pub const PARENT_PID: &str = "FLATSHARD_PARENT_PID";

/// Overrides this host's name. For tests, where one machine plays several hosts.
pub const HOST: &str = "FLATSHARD_HOST_ID";

/// The job's secret, shared by its ranks and unknown to strangers ([`super::handshake`]). Set by the user or by our own
/// launcher.
pub const JOB_SECRET: &str = "FLATSHARD_JOB_SECRET";

/// A local rank, or number of local ranks, that no variable gives. [`super::hosts::census`] determines it.
pub const UNKNOWN: usize = usize::MAX;

/// The least of the ids that Slurm gives to what is no step of srun's: batch scripts, shells of salloc.
const SPECIAL_STEPS: u32 = 0xffff_fff0;

/// The Slurm job of a batch script or a shell of an allocation, whose tasks only srun starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlurmShell {
    pub tasks: usize,
    pub hosts: usize,
}

impl SlurmShell {
    /// Reads the variables that `get` returns; `None` outside of such jobs, and for jobs of one task.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Option<SlurmShell> {
        let vars = Vars { get };
        let number = |name| vars.number(name).ok().flatten();
        let tasks = number("SLURM_NTASKS").filter(|&tasks: &usize| tasks > 1)?;
        vars.text("SLURM_JOB_ID")?;
        let is_task = vars.step_tasks().is_ok_and(|tasks| tasks.is_some());
        (!is_task)
            .then(|| SlurmShell { tasks, hosts: number("SLURM_JOB_NUM_NODES").or(number("SLURM_NNODES")).unwrap_or(1) })
    }
}

/// This process's place in its launcher's job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEnv {
    pub rank: usize,
    pub world: usize,
    /// Rank and number of ranks on this host. The second, or both, may be [`UNKNOWN`].
    pub local_rank: usize,
    pub local_world: usize,
    /// This host's name, for messages. Consecutive ranks with the same name share memory.
    pub host: String,
    /// Empty if ranks on several hosts need it and neither the user nor Slurm gives it.
    pub master_addr: String,
    pub master_port: u16,
    /// Distinguishes jobs on one host, together with the port: launcher, job id, restart count.
    pub run_id: String,
    pub arena_fd: Option<RawFd>,
    pub parent_pid: Option<u32>,
    pub secret: Option<Secret>,
    /// Whether the process can join an MPI world: started by mpirun, or by srun with --mpi.
    pub mpi: bool,
}

/// A launcher's variable names. Of several names, the first that is set counts.
struct LauncherNames {
    name: &'static str,
    rank: &'static [&'static str],
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
    /// Variables that identify its jobs.
    ids: &'static [&'static str],
    mpi: bool,
}

/// torchrun, and launchers that follow its names. DeepSpeed's launcher sets LOCAL_SIZE.
const TORCHRUN: LauncherNames = LauncherNames {
    name: "torchrun",
    rank: &["RANK"],
    world: &["WORLD_SIZE"],
    local_rank: &["LOCAL_RANK"],
    local_world: &["LOCAL_WORLD_SIZE", "LOCAL_SIZE"],
    ids: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    mpi: false,
};
const OPEN_MPI: LauncherNames = LauncherNames {
    name: "mpi",
    rank: &["OMPI_COMM_WORLD_RANK"],
    world: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    ids: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    mpi: true,
};
const MVAPICH: LauncherNames = LauncherNames {
    name: "mvapich",
    rank: &["MV2_COMM_WORLD_RANK"],
    world: &["MV2_COMM_WORLD_SIZE"],
    local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
    local_world: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    ids: &[],
    mpi: true,
};
/// Hydra, which starts MPICH and Intel MPI. Cray's PALS sets PMI_LOCAL_RANK and PMI_LOCAL_SIZE.
const PMI: LauncherNames = LauncherNames {
    name: "pmi",
    rank: &["PMI_RANK"],
    world: &["PMI_SIZE"],
    local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
    local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    ids: &[],
    mpi: true,
};
/// LSF's jsrun.
const JSM: LauncherNames = LauncherNames {
    name: "jsm",
    rank: &["JSM_NAMESPACE_RANK"],
    world: &["JSM_NAMESPACE_SIZE"],
    local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
    local_world: &["JSM_NAMESPACE_LOCAL_SIZE"],
    ids: &["LSB_JOBID", "PMIX_NAMESPACE"],
    mpi: true,
};

impl RankEnv {
    /// The only rank of a job, in the process that created `arena`.
    pub fn alone(arena: RawFd) -> RankEnv {
        RankEnv { arena_fd: Some(arena), ..RankEnv::first(1, 1) }
    }
    /// The first rank of a job on `hosts` with `ranks` each, to plan it without starting it.
    pub fn first(hosts: usize, ranks: usize) -> RankEnv {
        RankEnv {
            rank: 0,
            world: hosts * ranks,
            local_rank: 0,
            local_world: ranks,
            host: "localhost".into(),
            master_addr: "127.0.0.1".into(),
            master_port: 0,
            run_id: String::new(),
            arena_fd: None,
            parent_pid: None,
            secret: None,
            mpi: false,
        }
    }
    /// Reads the variables that `get` returns; `None` if no launcher started this process. Order: torchrun, Open MPI,
    /// MVAPICH, PMI, JSM, Slurm, because the inner launcher of a nest sets the more specific variables.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<RankEnv>> {
        let vars = Vars { get };
        let env = match vars.text("RANK") {
            Some(_) => vars.launched(&TORCHRUN)?,
            // A batch script may have exported the other variables for all of its ranks, with the rank set by the
            // launcher.
            None => match vars.unlike_torchrun()? {
                Some(env) => Some(vars.agreeing(env)?),
                None => vars.launched(&TORCHRUN)?,
            },
        };
        if let Some(RankEnv { rank, world, local_rank, local_world, .. }) = env
            && (rank >= world || local_world != UNKNOWN && (local_rank >= local_world || local_world > world))
        {
            return Err(Error::input(format!(
                "the launcher's variables contradict each other: rank {rank} of {world}, \
                 local rank {local_rank} of {local_world}"
            )));
        }
        Ok(env)
    }
}

/// A rank of a job on this host, for rendezvous tests.
#[cfg(test)]
pub(super) fn here(rank: usize, world: usize, port: u16) -> RankEnv {
    RankEnv {
        rank,
        world,
        local_rank: rank,
        local_world: world,
        host: "here".into(),
        master_addr: "127.0.0.1".into(),
        master_port: port,
        run_id: format!("test {}", std::process::id()),
        arena_fd: None,
        parent_pid: None,
        secret: None,
        mpi: false,
    }
}

struct Vars<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Vars<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).filter(|v| !v.is_empty())
    }
    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(Error::input(format!("{name}={text} is not a number; unset it or correct it"))),
        }
    }
    /// A number that is required because `because` is set.
    fn needed<T: std::str::FromStr>(&self, name: &str, because: &str) -> Result<T> {
        self.number(name)?.ok_or_else(|| {
            Error::input(format!(
                "{because} is set but {name} is not: set both, or unset both to let this command start the ranks"
            ))
        })
    }
    fn master_addr(&self, one_host: bool) -> Result<String> {
        let text =
            self.text("MASTER_ADDR").unwrap_or_else(|| if one_host { "127.0.0.1".into() } else { String::new() });
        // One colon means a port. An IPv6 address has more.
        if text.matches(':').count() == 1 || text.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(Error::input(format!(
                "MASTER_ADDR={text} is neither a host name nor an address; put the port in MASTER_PORT"
            )));
        }
        Ok(text)
    }
    fn finish(&self, ranks: [usize; 4], run_id: String) -> Result<RankEnv> {
        let [rank, world, local_rank, local_world] = ranks;
        Ok(RankEnv {
            rank,
            world,
            local_rank,
            local_world,
            host: self.text(HOST).unwrap_or_else(host_name),
            master_addr: self.master_addr(world == local_world)?,
            master_port: self.number("MASTER_PORT")?.unwrap_or(29500),
            run_id,
            arena_fd: self.number(ARENA_FD)?,
            parent_pid: self.number(PARENT_PID)?,
            secret: self.text(JOB_SECRET).map(|text| Secret::new(&text, JOB_SECRET)).transpose()?,
            mpi: false,
        })
    }

    fn unlike_torchrun(&self) -> Result<Option<RankEnv>> {
        for launcher in [&OPEN_MPI, &MVAPICH, &PMI, &JSM] {
            if launcher.name == PMI.name && self.slurm_speaks_pmi() {
                continue; // Slurm's own variables are more complete
            }
            if let Some(env) = self.launched(launcher)? {
                return Ok(Some(env));
            }
        }
        match (self.slurm()?, self.text("PMIX_RANK")) {
            (None, Some(rank)) if self.text("SLURM_JOB_ID").is_none() => Err(Error::input(format!(
                "PMIX_RANK={rank} is set, but no PMIx variable gives the world size: set RANK, WORLD_SIZE \
                 and MASTER_ADDR for each rank, or unset PMIX_RANK to let this command start the ranks"
            ))),
            (env, _) => Ok(env),
        }
    }
    /// srun --mpi=pmi2 numbers its tasks in PMI's variables too. A launcher that srun starts on each host uses other
    /// numbers, or sets local ones.
    fn slurm_speaks_pmi(&self) -> bool {
        let same = |a, b: Option<String>| self.text(a).is_some() && self.text(a) == b;
        let says_local = PMI.local_rank.iter().any(|name| self.text(name).is_some());
        let tasks = self.step_tasks().ok().flatten().map(|tasks| tasks.to_string());
        same("PMI_RANK", self.text("SLURM_PROCID")) && same("PMI_SIZE", tasks) && !says_local
    }
    /// Checks that those torchrun variables that are set agree.
    fn agreeing(&self, env: RankEnv) -> Result<RankEnv> {
        for (name, is) in [("WORLD_SIZE", env.world), ("LOCAL_RANK", env.local_rank)] {
            if let Some(n) = self.number::<usize>(name)?.filter(|&n| n != is && is != UNKNOWN) {
                return Err(Error::input(format!(
                    "{name}={n} contradicts the launcher's own variables, which give {is} (rank {} of {}): unset {name}, or set RANK, \
                     WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE",
                    env.rank, env.world
                )));
            }
        }
        Ok(env)
    }

    fn launched(&self, launcher: &LauncherNames) -> Result<Option<RankEnv>> {
        let first = |names: &'static [&'static str]| {
            names.iter().copied().find(|name| self.text(name).is_some()).unwrap_or(names[0])
        };
        let [rank, world, local_rank, local_world] =
            [launcher.rank, launcher.world, launcher.local_rank, launcher.local_world].map(first);
        let set = |name: &&str| self.text(name).is_some();
        let Some(because) = [rank, world, local_rank].into_iter().find(set) else { return Ok(None) };
        let (ranks, at) = (self.needed(world, because)?, self.needed(rank, because)?);
        let (local, locals) = (self.number(local_rank)?, self.number(local_world)?);
        let (local, locals) = match (local, locals) {
            (local, None) if ranks == 1 => (local.unwrap_or(0), 1),
            // Assumes ranks are numbered host by host; if not, they are refused when they meet.
            (local, Some(locals)) => (local.unwrap_or(at % std::cmp::max(locals, 1)), locals),
            (local, None) if self.text("MASTER_ADDR").is_some() => (local.unwrap_or(UNKNOWN), UNKNOWN),
            (_, None) => {
                return Err(Error::input(format!(
                    "{because} is set, but neither {local_world} nor MASTER_ADDR is, so ranks cannot find out which share a \
                     host: set {local_rank} and {local_world} (ranks on this host), or MASTER_ADDR (rank 0's host)"
                )));
            }
        };
        let ids = launcher.ids.iter().map(|name| self.text(name).unwrap_or_default());
        let run_id = ids.fold(launcher.name.to_string(), |ids, id| ids + " " + &id);
        let env = self.finish([at, ranks, local, locals], run_id)?;
        Ok(Some(RankEnv { mpi: launcher.mpi, ..env }))
    }

    /// The tasks of the step in which srun started this process; none in a batch script or a shell of an allocation.
    /// Both have SLURM_PROCID 0 and the job's SLURM_NTASKS, but no SLURM_STEP_ID, or a special one (salloc's shell).
    fn step_tasks(&self) -> Result<Option<usize>> {
        let id = self.text("SLURM_STEP_ID").and_then(|id| id.parse::<u32>().ok());
        match id.is_some_and(|id| id < SPECIAL_STEPS) {
            true => Ok(self.number("SLURM_STEP_NUM_TASKS")?.or(self.number("SLURM_NTASKS")?)),
            false => Ok(None),
        }
    }
    fn slurm(&self) -> Result<Option<RankEnv>> {
        // A step of one task is often a shell too, and starts its own ranks.
        let Some(world) = self.step_tasks()?.filter(|&tasks| tasks > 1) else { return Ok(None) };
        let rank = self.needed("SLURM_PROCID", "SLURM_STEP_ID")?;
        let local_rank = self.needed("SLURM_LOCALID", "SLURM_STEP_ID")?;
        let nodes: usize = self.number("SLURM_STEP_NUM_NODES")?.or(self.number("SLURM_NNODES")?).unwrap_or(1);
        let local_world = if nodes == 1 { world } else { world.div_ceil(nodes).max(local_rank + 1) };
        let [job, step, restart] =
            ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"].map(|name| self.text(name).unwrap_or_default());
        let mpi = ["PMIX_RANK", "PMI_RANK"].iter().any(|name| self.text(name).is_some());
        let mut env = self.finish([rank, world, local_rank, local_world], format!("slurm {job} {step} {restart}"))?;
        if env.master_addr.is_empty() {
            env.master_addr = self.first_node()?;
        }
        Ok(Some(RankEnv { mpi, ..env }))
    }
    /// The host of Slurm's task 0: the first node of the step, unless a host file distributes the tasks. Empty if there
    /// is no node list.
    fn first_node(&self) -> Result<String> {
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        let Some((name, list)) = lists.into_iter().find_map(|name| Some((name, self.text(name)?))) else {
            return Ok(String::new());
        };
        nodelist::first(&list).ok_or_else(|| {
            Error::input(format!("{name}={list} is not a node list; set MASTER_ADDR to the name of rank 0's host"))
        })
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;

//! The one file that reads environment variables: what launchers say about this rank, and where things of the user are.
//! Never writes any.
use super::nodelist;
use super::secret::Secret;
use crate::base::{Error, Result};
use std::env::{temp_dir, var_os};
use std::os::fd::RawFd;
use std::path::PathBuf;

/// Set by our own launcher: the descriptor of the arena, which the ranks inherit.
pub const ARENA_FD: &str = "FLATSHARD_ARENA_FD";
/// Set by our own launcher: its process, which no rank outlives.
pub const PARENT_PID: &str = "FLATSHARD_PARENT_PID";

/// Overrides this host's name. For tests, where one machine is several hosts.
pub const HOST: &str = "FLATSHARD_HOST_ID";

/// The secret that the job's ranks know and strangers do not ([`super::handshake`]). Set by the user, and by our own
/// launcher.
pub const JOB_SECRET: &str = "FLATSHARD_JOB_SECRET";

/// This process's place in the job of a launcher.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEnv {
    pub rank: usize,
    pub world: usize,
    /// Among the ranks of this host.
    pub local_rank: usize,
    pub local_world: usize,
    /// This host's name, for messages; ranks with the same one that are numbered together share memory.
    pub host: String,
    /// Empty where it is needed, not given and not told by Slurm: ranks on several hosts.
    pub master_addr: String,
    pub master_port: u16,
    /// Tells jobs on one host apart, together with the port: launcher, job id, restart count.
    pub run_id: String,
    pub arena_fd: Option<RawFd>,
    pub parent_pid: Option<u32>,
    pub secret: Option<Secret>,
    /// Started so that it can join an MPI world: by mpirun, or srun with --mpi.
    pub mpi: bool,
}

impl RankEnv {
    /// `None` when no launcher started this process. torchrun, then Open MPI, then SLURM: the inner launcher of a nest
    /// has set the more specific variables.
    pub fn from_env() -> Result<Option<RankEnv>> {
        RankEnv::read(&|name| var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }
    /// As [`RankEnv::from_env`], from the variables that `get` gives.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<RankEnv>> {
        let vars = Vars { get };
        let env = match vars.torchrun()? {
            Some(env) => Some(env),
            None => match vars.open_mpi()? {
                Some(env) => Some(env),
                None => vars.slurm()?,
            },
        };
        if let Some(RankEnv { rank, world, local_rank, local_world, .. }) = env
            && (rank >= world || local_rank >= local_world || local_world > world)
        {
            return Err(Error::input(format!(
                "the launcher's variables contradict each other: rank {rank} of {world}, \
                 local rank {local_rank} of {local_world}"
            )));
        }
        Ok(env)
    }
}

/// A rank of a job on this host, for tests of how ranks meet.
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
            Err(_) => Err(Error::input(format!("{name}={text} is not a number; unset it or set it right"))),
        }
    }
    /// A number that must be there since `because` is.
    fn needed<T: std::str::FromStr>(&self, name: &str, because: &str) -> Result<T> {
        self.number(name)?.ok_or_else(|| {
            Error::input(format!(
                "{because} is set but {name} is not: set both, or unset both to start ranks from here"
            ))
        })
    }
    fn master_addr(&self, one_host: bool) -> Result<String> {
        let text =
            self.text("MASTER_ADDR").unwrap_or_else(|| if one_host { "127.0.0.1".into() } else { String::new() });
        // One colon: a port. An IPv6 address has more.
        if text.matches(':').count() == 1 || text.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(Error::input(format!(
                "MASTER_ADDR={text} is neither a name nor an address of a host; the port is MASTER_PORT's"
            )));
        }
        Ok(text)
    }
    fn finish(&self, ranks: [usize; 4], run_id: String) -> Result<Option<RankEnv>> {
        let [rank, world, local_rank, local_world] = ranks;
        Ok(Some(RankEnv {
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
        }))
    }

    fn torchrun(&self) -> Result<Option<RankEnv>> {
        let set = |name: &&str| self.text(name).is_some();
        let Some(because) = ["RANK", "WORLD_SIZE", "LOCAL_RANK"].into_iter().find(set) else { return Ok(None) };
        let world = self.needed("WORLD_SIZE", because)?;
        let rank = self.needed("RANK", because)?;
        let local_rank = self.needed("LOCAL_RANK", because)?;
        // Not every launcher that follows torchrun's names sets this one: on one host the local ranks are the ranks.
        let alone = if local_rank == rank { world } else { local_rank + 1 };
        let local_world = self.number("LOCAL_WORLD_SIZE")?.unwrap_or(alone);
        let id = self.text("TORCHELASTIC_RUN_ID").unwrap_or_default();
        let restart: u32 = self.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0);
        self.finish([rank, world, local_rank, local_world], format!("torchrun {id} {restart}"))
    }

    fn open_mpi(&self) -> Result<Option<RankEnv>> {
        let name = |last: &str| format!("OMPI_COMM_WORLD_{last}");
        let all = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"].map(name);
        let Some(because) = all.iter().find(|name| self.text(name).is_some()) else { return Ok(None) };
        let mut ranks = [0; 4];
        for (value, name) in ranks.iter_mut().zip(&all) {
            *value = self.needed(name, because)?;
        }
        let id = self.text("PMIX_NAMESPACE").or_else(|| self.text("OMPI_MCA_ess_base_jobid")).unwrap_or_default();
        Ok(self.finish(ranks, format!("mpi {id}"))?.map(|env| RankEnv { mpi: true, ..env }))
    }

    fn slurm(&self) -> Result<Option<RankEnv>> {
        let Some(world) = self.number::<usize>("SLURM_NTASKS")? else { return Ok(None) };
        // One task, or no process number: a shell inside an allocation, not a rank that srun started.
        if world == 1 || self.text("SLURM_PROCID").is_none() {
            return Ok(None);
        }
        let rank = self.needed("SLURM_PROCID", "SLURM_NTASKS")?;
        let local_rank = self.needed("SLURM_LOCALID", "SLURM_NTASKS")?;
        let nodes: usize = self.number("SLURM_NNODES")?.unwrap_or(1);
        let local_world = if nodes == 1 { world } else { world.div_ceil(nodes).max(local_rank + 1) };
        let [job, step, restart] =
            ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"].map(|name| self.text(name).unwrap_or_default());
        let mpi = ["PMIX_RANK", "PMI_RANK"].iter().any(|name| self.text(name).is_some());
        let env = self.finish([rank, world, local_rank, local_world], format!("slurm {job} {step} {restart}"))?;
        let Some(mut env) = env else { return Ok(None) };
        if env.master_addr.is_empty() {
            env.master_addr = self.first_node()?;
        }
        Ok(Some(RankEnv { mpi, ..env }))
    }
    /// The host of Slurm's task 0: the first of the step's nodes, unless tasks are distributed by a file of hosts.
    /// Empty where there is no list.
    fn first_node(&self) -> Result<String> {
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        let Some((name, list)) = lists.into_iter().find_map(|name| Some((name, self.text(name)?))) else {
            return Ok(String::new());
        };
        nodelist::first(&list).ok_or_else(|| {
            Error::input(format!("{name}={list} is no list of nodes; set MASTER_ADDR to the name of rank 0's host"))
        })
    }
}

/// Whether NCCL was given a name for this rank's host, so that ranks may share a GPU.
pub fn names_nccl_host() -> bool {
    var_os("NCCL_HOSTID").is_some()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
fn path(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}
pub fn home() -> Option<PathBuf> {
    path("HOME")
}
/// Where cargo keeps the sources of crates: `CARGO_HOME`, else `~/.cargo`.
pub fn cargo_home() -> Option<PathBuf> {
    path("CARGO_HOME").or_else(|| Some(home()?.join(".cargo")))
}
/// For tokenised corpora: `FLATSHARD_CACHE_DIR`, else below `XDG_CACHE_HOME`, `~/.cache` or the directory for temporary
/// files.
pub fn cache_dir() -> PathBuf {
    path("FLATSHARD_CACHE_DIR").unwrap_or_else(|| {
        let base = path("XDG_CACHE_HOME").or_else(|| Some(home()?.join(".cache")));
        base.unwrap_or_else(temp_dir).join("flatshard")
    })
}

/// For files that go with their process.
pub fn scratch_dir() -> PathBuf {
    temp_dir()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Option<RankEnv>> {
        RankEnv::read(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }
    fn ranks(env: RankEnv) -> [usize; 4] {
        [env.rank, env.world, env.local_rank, env.local_world]
    }
    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29400"),
    ];
    const MPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "3"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
        ("PMIX_NAMESPACE", "prterun-1"),
    ];
    const SLURM: [(&str, &str); 5] = [
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NNODES", "2"),
        ("SLURM_JOB_ID", "77"),
    ];

    #[test]
    fn each_launcher_is_understood() {
        assert_eq!(read(&[]).unwrap(), None);
        let env = read(&TORCHRUN).unwrap().unwrap();
        assert_eq!((env.master_addr.as_str(), env.master_port, env.arena_fd), ("node7", 29400, None));
        assert_eq!(ranks(env), [5, 8, 1, 4]);
        let env = read(&MPI).unwrap().unwrap();
        assert_eq!((env.master_addr.as_str(), env.run_id.as_str()), ("127.0.0.1", "mpi prterun-1"));
        assert_eq!(ranks(env), [2, 3, 2, 3]);
        assert_eq!(read(&SLURM).unwrap().unwrap().master_addr, ""); // two hosts of which nobody says the names
        assert_eq!(ranks(read(&SLURM).unwrap().unwrap()), [3, 4, 1, 2]);
    }

    #[test]
    fn slurms_first_node_is_the_master_unless_one_is_given() {
        let with = |more: &[(&str, &str)]| read(&[&SLURM[..], more].concat());
        let addr = |more: &[(&str, &str)]| with(more).unwrap().unwrap().master_addr;
        let job = ("SLURM_JOB_NODELIST", "node[08-11]");
        assert_eq!(addr(&[job]), "node08");
        assert_eq!(addr(&[job, ("SLURM_STEP_NODELIST", "node[10-11]")]), "node10");
        assert_eq!(addr(&[job, ("MASTER_ADDR", "10.0.0.3")]), "10.0.0.3");
        let one = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "1"), ("SLURM_NNODES", "1"), job];
        assert_eq!(read(&one).unwrap().unwrap().master_addr, "127.0.0.1");
        let e = with(&[("SLURM_JOB_NODELIST", "node[1-")]).unwrap_err();
        assert_eq!(e.exit_status(), 2);
        assert!(e.to_string().contains("SLURM_JOB_NODELIST=node[1- is no list of nodes; set MASTER_ADDR"), "{e}");
        // Under mpirun rank 0 may be anywhere in the allocation.
        let mpi = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "0")];
        let mpi = [&mpi[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), job]].concat();
        assert_eq!(read(&mpi).unwrap().unwrap().master_addr, "");
    }

    #[test]
    fn torchrun_comes_before_mpi_and_mpi_before_slurm() {
        let all = [&SLURM[..], &MPI, &TORCHRUN].concat();
        assert_eq!(read(&all).unwrap().unwrap().world, 8);
        assert_eq!(read(&[&SLURM[..], &MPI].concat()).unwrap().unwrap().world, 3);
    }

    #[test]
    fn a_shell_inside_an_allocation_is_no_rank() {
        assert_eq!(read(&[("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "77")]).unwrap(), None);
        assert_eq!(read(&[("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0")]).unwrap(), None);
    }

    #[test]
    fn half_set_malformed_and_contradicting_variables_are_named() {
        let message = |vars: &[(&str, &str)]| {
            let e = read(vars).unwrap_err();
            assert_eq!(e.exit_status(), 2);
            e.to_string()
        };
        let text = message(&[("RANK", "0")]);
        assert!(text.contains("RANK is set but WORLD_SIZE is not"), "{text}");
        let text = message(&[("RANK", "0"), ("WORLD_SIZE", "two"), ("LOCAL_RANK", "0")]);
        assert!(text.contains("WORLD_SIZE=two is not a number"), "{text}");
        for addr in ["node7:29500", "tcp://node7", "node 7"] {
            let text = message(&[&TORCHRUN[..4], &[("MASTER_ADDR", addr)]].concat());
            assert!(text.contains(&format!("MASTER_ADDR={addr} is neither")), "{text}");
        }
        let text = message(&[("OMPI_COMM_WORLD_SIZE", "2")]);
        assert!(text.contains("OMPI_COMM_WORLD_RANK"), "{text}");
        let text = message(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2")]);
        assert!(text.contains("rank 2 of 2"), "{text}");
        let text = message(&[("SLURM_NTASKS", "2"), ("SLURM_PROCID", "0")]);
        assert!(text.contains("SLURM_LOCALID"), "{text}");
    }
}

//! What launchers say about this rank, from their variables as values. Never reads the environment itself:
//! [`super::env`] does.
use super::nodelist;
use super::secret::Secret;
use crate::base::{Error, Result};
use std::os::fd::RawFd;

/// Set by our own launcher: the descriptor of the arena, which the ranks inherit.
pub const ARENA_FD: &str = "FLATSHARD_ARENA_FD";
/// Set by our own launcher: its process, which no rank outlives.
pub const PARENT_PID: &str = "FLATSHARD_PARENT_PID";

/// Overrides this host's name. For tests, where one machine is several hosts.
pub const HOST: &str = "FLATSHARD_HOST_ID";

/// The secret that the job's ranks know and strangers do not ([`super::handshake`]). Set by the user, and by our own
/// launcher.
pub const JOB_SECRET: &str = "FLATSHARD_JOB_SECRET";

/// A local rank, or a number of local ranks, that no variable gives: [`super::hosts::census`] finds it.
pub const UNKNOWN: usize = usize::MAX;

/// This process's place in the job of a launcher.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEnv {
    pub rank: usize,
    pub world: usize,
    /// Among the ranks of this host; or [`UNKNOWN`], both or the second.
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

/// What a launcher calls its numbers. Of several names the first that is set counts.
struct LauncherNames {
    name: &'static str,
    rank: &'static [&'static str],
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
    /// What tells its jobs apart.
    ids: &'static [&'static str],
    mpi: bool,
}

/// torchrun, and whatever follows its names; DeepSpeed's launcher has LOCAL_SIZE.
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
/// Hydra's, which starts MPICH and Intel MPI; Cray's PALS has PMI_LOCAL_RANK and PMI_LOCAL_SIZE.
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
    /// From the variables that `get` gives; `None` when no launcher started this process. torchrun, Open MPI, MVAPICH,
    /// PMI, JSM, Slurm: the inner launcher of a nest has set the more specific variables.
    pub fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<RankEnv>> {
        let vars = Vars { get };
        let env = match vars.text("RANK") {
            Some(_) => vars.launched(&TORCHRUN)?,
            // A batch script may have exported the others for all of its ranks, and the launcher says the rank.
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
                continue; // Slurm's own variables say more
            }
            if let Some(env) = self.launched(launcher)? {
                return Ok(Some(env));
            }
        }
        match (self.slurm()?, self.text("PMIX_RANK")) {
            (None, Some(rank)) if self.text("SLURM_JOB_ID").is_none() => Err(Error::input(format!(
                "PMIX_RANK={rank} is set, but none of PMIx's variables says how many ranks there are: set RANK, WORLD_SIZE \
                 and MASTER_ADDR for each rank, or unset PMIX_RANK to start ranks from here"
            ))),
            (env, _) => Ok(env),
        }
    }
    /// srun --mpi=pmi2 numbers its tasks in PMI's variables, too. A launcher that srun has started on each host has
    /// other numbers, or says local ones.
    fn slurm_speaks_pmi(&self) -> bool {
        let same = |a, b| self.text(a).is_some() && self.text(a) == self.text(b);
        let says_local = PMI.local_rank.iter().any(|name| self.text(name).is_some());
        same("PMI_RANK", "SLURM_PROCID") && same("PMI_SIZE", "SLURM_NTASKS") && !says_local
    }
    /// Those of torchrun's variables that are set say the same.
    fn agreeing(&self, env: RankEnv) -> Result<RankEnv> {
        for (name, is) in [("WORLD_SIZE", env.world), ("LOCAL_RANK", env.local_rank)] {
            if let Some(n) = self.number::<usize>(name)?.filter(|&n| n != is && is != UNKNOWN) {
                return Err(Error::input(format!(
                    "{name}={n} is set, but the launcher's own variables say {is} (rank {} of {}): unset {name}, or set RANK, \
                     WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE all four",
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
            // Ranks are numbered host by host, or refused when they meet.
            (local, Some(locals)) => (local.unwrap_or(at % std::cmp::max(locals, 1)), locals),
            (local, None) if self.text("MASTER_ADDR").is_some() => (local.unwrap_or(UNKNOWN), UNKNOWN),
            (_, None) => {
                return Err(Error::input(format!(
                    "{because} is set but {local_world} is not, and neither is MASTER_ADDR, where the ranks could tell each \
                     other their hosts: set {local_rank} and {local_world} (ranks of this host), or MASTER_ADDR (rank 0's host)"
                )));
            }
        };
        let ids = launcher.ids.iter().map(|name| self.text(name).unwrap_or_default());
        let run_id = ids.fold(launcher.name.to_string(), |ids, id| ids + " " + &id);
        let env = self.finish([at, ranks, local, locals], run_id)?;
        Ok(Some(RankEnv { mpi: launcher.mpi, ..env }))
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
        let mut env = self.finish([rank, world, local_rank, local_world], format!("slurm {job} {step} {restart}"))?;
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

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
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
    const AGENT: [(&str, &str); 6] = [
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
        let env = read(&AGENT).unwrap().unwrap();
        assert_eq!((env.master_addr.as_str(), env.master_port, env.arena_fd), ("node7", 29400, None));
        assert_eq!(ranks(env), [5, 8, 1, 4]);
        let env = read(&MPI).unwrap().unwrap();
        assert_eq!((env.master_addr.as_str(), env.run_id.as_str()), ("127.0.0.1", "mpi prterun-1 "));
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

    /// The numbers of `launcher`, by its first names or its last.
    fn says(launcher: &LauncherNames, last: bool, ranks: [usize; 4]) -> Vec<(&'static str, String)> {
        let name = |names: &[&'static str]| if last { names[names.len() - 1] } else { names[0] };
        let names = [launcher.rank, launcher.world, launcher.local_rank, launcher.local_world].map(name);
        names.into_iter().zip(ranks.map(|n| n.to_string())).collect()
    }
    fn read_all(vars: &[(&str, String)]) -> Result<Option<RankEnv>> {
        read(&vars.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>())
    }
    const IN_ORDER: [&LauncherNames; 5] = [&TORCHRUN, &OPEN_MPI, &MVAPICH, &PMI, &JSM];

    #[test]
    fn launchers_go_before_each_other_in_the_documented_order() {
        // Each says another number of ranks; Slurm, the last, says 4.
        let mut all: Vec<_> = SLURM.map(|(name, value)| (name, value.to_string())).into();
        assert_eq!(read_all(&all).unwrap().unwrap().world, 4);
        for (world, launcher) in (10..).zip(IN_ORDER.into_iter().rev()) {
            all.extend(says(launcher, false, [3, world, 3, world]));
            let env = read_all(&all).unwrap().unwrap();
            assert_eq!((env.world, env.mpi), (world, launcher.mpi), "{}", launcher.name);
        }
    }

    #[test]
    fn each_name_of_a_launcher_is_read() {
        for launcher in IN_ORDER {
            for last in [false, true] {
                let mut vars = says(launcher, last, [5, 8, 1, 4]);
                vars.push(("MASTER_ADDR", "node7".into()));
                let env = read_all(&vars).unwrap().unwrap();
                assert_eq!(
                    (ranks(env.clone()), env.master_addr.as_str()),
                    ([5, 8, 1, 4], "node7"),
                    "{}",
                    launcher.name
                );
                // Several hosts, and nobody says which is rank 0's: refused by name when ranks are to meet.
                vars.pop();
                assert_eq!(read_all(&vars).unwrap().unwrap().master_addr, "", "{}", launcher.name);
            }
            let e = read_all(&says(launcher, false, [5, 8, 1, 4])[..1]).unwrap_err();
            assert!(
                e.to_string().contains(&format!("{} is set but {} is not", launcher.rank[0], launcher.world[0])),
                "{e}"
            );
        }
    }

    #[test]
    fn slurm_that_speaks_pmi_is_slurm_and_hydra_under_slurm_is_hydra() {
        let pmi2 = [&SLURM[..], &[("PMI_RANK", "3"), ("PMI_SIZE", "4")]].concat();
        let env = read(&pmi2).unwrap().unwrap();
        assert_eq!((ranks(env.clone()), env.mpi), ([3, 4, 1, 2], true));
        // A shell of one task, in which plain starts start their own ranks.
        let one = [("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")];
        assert_eq!(read(&one).unwrap(), None);
        let hydra = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
        assert_eq!(ranks(read(&[&SLURM[..], &hydra].concat()).unwrap().unwrap()), [3, 4, 0, 1]);
    }

    #[test]
    fn a_lone_rank_of_pmix_is_refused_by_name() {
        let e = read(&[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "x")]).unwrap_err();
        assert!(e.exit_status() == 2 && e.to_string().contains("PMIX_RANK=1 is set"), "{e}");
        let slurm = [("PMIX_RANK", "0"), ("SLURM_JOB_ID", "77"), ("SLURM_NTASKS", "1"), ("SLURM_PROCID", "0")];
        assert_eq!(read(&slurm).unwrap(), None);
        assert!(read(&[&SLURM[..], &[("PMIX_RANK", "3")]].concat()).unwrap().unwrap().mpi);
    }

    #[test]
    fn local_numbers_that_are_missing_are_completed_found_or_refused() {
        let two = [("RANK", "1"), ("WORLD_SIZE", "2")];
        let with = |more: &[(&str, &str)]| read(&[&two[..], more].concat());
        // One host or two: the ranks ask one another at MASTER_ADDR, or nobody can say.
        let at = ("MASTER_ADDR", "node1");
        assert_eq!(ranks(with(&[at]).unwrap().unwrap()), [1, 2, UNKNOWN, UNKNOWN]);
        assert_eq!(ranks(with(&[at, ("LOCAL_RANK", "1")]).unwrap().unwrap()), [1, 2, 1, UNKNOWN]);
        let e = with(&[("LOCAL_RANK", "1")]).unwrap_err();
        let says = "RANK is set but LOCAL_WORLD_SIZE is not, and neither is MASTER_ADDR";
        assert!(e.exit_status() == 2 && e.to_string().contains(says), "{e}");
        let e = read(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]).unwrap_err();
        assert!(e.to_string().contains("PMI_RANK is set but MPI_LOCALNRANKS is not"), "{e}");
        // Certain.
        assert_eq!(ranks(with(&[("LOCAL_WORLD_SIZE", "2")]).unwrap().unwrap()), [1, 2, 1, 2]);
        assert_eq!(ranks(with(&[("LOCAL_WORLD_SIZE", "1")]).unwrap().unwrap()), [1, 2, 0, 1]);
        assert_eq!(ranks(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().unwrap()), [0, 1, 0, 1]);
    }

    #[test]
    fn what_a_batch_script_exports_for_all_ranks_agrees_with_the_launcher() {
        let with = |world| read(&[&SLURM[..], &[("WORLD_SIZE", world), ("MASTER_ADDR", "node1")]].concat());
        assert_eq!(ranks(with("4").unwrap().unwrap()), [3, 4, 1, 2]);
        let e = with("8").unwrap_err();
        assert!(e.to_string().contains("WORLD_SIZE=8 is set, but the launcher's own variables say 4"), "{e}");
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
            let text = message(&[&AGENT[..4], &[("MASTER_ADDR", addr)]].concat());
            assert!(text.contains(&format!("MASTER_ADDR={addr} is neither")), "{text}");
        }
        let text = message(&[("OMPI_COMM_WORLD_SIZE", "2")]);
        assert!(text.contains("OMPI_COMM_WORLD_RANK"), "{text}");
        let text = message(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        assert!(text.contains("rank 2 of 2"), "{text}");
        let text = message(&[("SLURM_NTASKS", "2"), ("SLURM_PROCID", "0")]);
        assert!(text.contains("SLURM_LOCALID"), "{text}");
    }
}

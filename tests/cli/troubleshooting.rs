//! The troubleshooting page quotes real messages: each quoted message is provoked here and compared with the page,
//! where `...` stands for anything.

use crate::common;
use crate::common::runs::*;
use flatshard::base::DType;
use flatshard::comm::env::RankEnv;
use flatshard::comm::mesh::MeshSizes;
use flatshard::comm::nccl::rendezvous::exchange;
use flatshard::engine::Engine;
use flatshard::run::r#loop::verify::Verify;
use rustix::process::Signal;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

/// Provokes a message, and returns the whole output.
type Provoke = fn(&Dir) -> String;
/// Headings with a message.
const PROVOKED: [(&str, Provoke); 21] = [
    ("Before the start", a_plan_that_does_not_fit),
    ("While it starts", memory_that_is_refused),
    ("While it runs", a_rank_that_is_killed),
    ("A rank does not answer", a_rank_that_is_stopped),
    ("Ranks do not find each other", ranks_with_different_ports),
    ("Ranks have different secrets", ranks_with_different_secrets),
    ("A job without a secret", two_hosts_without_a_secret),
    ("A job is started twice", a_job_that_is_there_already),
    ("A port is taken", ports_that_are_taken),
    ("Environment variables", half_of_the_variables),
    ("On a setting", |dir| two(dir, &["--max-steps", "1"], [&[], &["--lr", "0.003"]])),
    ("On the data", copies_that_are_not_equal),
    ("On the directory of checkpoints", directories_of_their_own),
    ("On their number", |_| say(FSDP, &["--dp-replicate-size", "3"])),
    ("A locked directory", a_second_job),
    ("A directory that is in use already", |dir| {
        good(FSDP, &["--max-steps", "1", "--ckpt-dir", &dir.arg("ckpt")]);
        say(FSDP, &["--max-steps", "1", "--ckpt-dir", &dir.arg("ckpt")])
    }),
    ("A damaged checkpoint", a_flipped_bit),
    ("They are not finite", |_| {
        say(FSDP, &["--lr", "1e30", "--warmup-steps", "0", "--max-steps", "9", "--max-bad-steps", "2"])
    }),
    ("They differ from an earlier run's", |dir| {
        good(FSDP, &["--max-steps", "1", "--ckpt-dir", &dir.arg("ckpt")]);
        let more = ["--max-steps", "2", "--betas", "0.8", "0.95", "--ckpt-dir"];
        say(FSDP, &[&more[..], &[&dir.arg("ckpt"), "--resume", "auto"]].concat())
    }),
    ("Replicas have drifted apart", |_| a_bit_of_one_replica()),
    ("Slow networks", |dir| {
        good(FSDP, &["--max-steps", "1", "--metrics-path", &dir.arg("m.jsonl")]);
        fs::read_to_string(dir.path("m.jsonl")).unwrap()
    }),
];
/// Heading and message of each block of the page.
fn page() -> Vec<(String, String)> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/troubleshooting.md");
    let (mut messages, mut heading, mut block) = (Vec::new(), String::new(), None::<String>);
    for line in fs::read_to_string(path).unwrap().lines() {
        match (&mut block, line) {
            (Some(_), "```") => messages.extend(block.take().map(|text| (heading.clone(), text))),
            (Some(text), line) => *text += &format!("{}{line}", if text.is_empty() { "" } else { "\n" }),
            (None, "```sh" | "```sh run" | "```") => {} // the command that the page opens with
            (None, line) if line.starts_with("```") => block = Some(String::new()),
            (None, line) if line.starts_with('#') => heading = line.trim_start_matches('#').trim().into(),
            _ => {}
        }
    }
    messages
}
/// Whether `said` contains the parts of `message` between its dots, in order.
fn holds(said: &str, message: &str) -> bool {
    let mut rest = said;
    message.split("...").all(|part| rest.find(part).map(|at| rest = &rest[at + part.len()..]).is_some())
}

#[test]
fn every_message_of_the_page_is_real() {
    let page = page();
    assert_eq!(page.len(), PROVOKED.len(), "{page:?}");
    let proofs = page.iter().map(|(heading, message)| {
        let proof = PROVOKED.iter().find(|(proved, _)| proved == heading);
        let (_, provoke) = proof.unwrap_or_else(|| panic!("nothing provokes the message of {heading}"));
        (heading, message, provoke)
    });
    // They wait more than they compute.
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let proofs: Vec<_> = proofs
            .map(|(heading, message, provoke)| scope.spawn(move || (heading, message, provoke(&Dir::new()))))
            .collect();
        let said = proofs.into_iter().map(|proof| proof.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        said.filter(|(_, message, said)| !holds(said, message))
            .map(|(heading, message, said)| format!("{heading}: the page has\n{message}\nbut what was said is\n{said}"))
            .collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn other_wording_fails() {
    let said = "error: rank 1 has 5 of 7 things";
    assert!(holds(said, "rank ... has ... of 7") && holds(said, "rank 1 has 5"));
    assert!(!holds(said, "rank ... has ... of 8") && !holds(said, "of 7 ... rank"));
}

/// The stderr of a run, whether it fails or not.
fn say(program: &str, args: &[&str]) -> String {
    Run::start(program, args).end().stderr
}
/// A command as torchrun starts it.
fn rank(mut command: Command, rank: usize, world: usize, dir: &Dir) -> Command {
    launched(&mut command, rank, world, 29533).env("TORCHELASTIC_RUN_ID", dir.arg("job"));
    command
}
/// The output of two ranks with these different arguments.
fn two(dir: &Dir, common: &[&str], own: [&[&str]; 2]) -> String {
    let start = |r: usize| rank(command(FSDP, &[common, own[r]].concat()), r, 2, dir).spawn().unwrap();
    let ranks = [0, 1].map(start).map(Run);
    ranks.map(|rank| rank.end().stderr).concat()
}

fn a_plan_that_does_not_fit(_: &Dir) -> String {
    say(FSDP, &["--embed-dim", "1048576", "--ff-hidden-dim", "1048576"])
}

/// A rank takes some 400 MiB of addresses before it allocates anything; this model needs as much again and more.
fn memory_that_is_refused(_: &Dir) -> String {
    let model = ["--embed-dim", "1024", "--num-layers", "4", "--nproc-per-node", "1", "--max-steps", "1"];
    let run = command(FSDP, &model);
    let mut limited = Command::new("bash");
    limited.args(["-c", "ulimit -v 900000; exec \"$0\" \"$@\"", FSDP]).args(run.get_args());
    String::from_utf8(limited.output().unwrap().stderr).unwrap()
}

fn a_rank_that_is_killed(dir: &Dir) -> String {
    let run = Run::start(FSDP, &["--max-steps", "100000", "--metrics-path", &dir.arg("m.jsonl")]);
    wait_until("it trains", || steps(&dir.path("m.jsonl")) > 2);
    send(Signal::KILL, run.ranks(2)[1]);
    run.end().stderr
}

fn a_rank_that_is_stopped(dir: &Dir) -> String {
    let (metrics, ckpt) = (dir.arg("m.jsonl"), dir.arg("ckpt"));
    let places = ["--metrics-path", &metrics, "--ckpt-dir", &ckpt]; // what ranks did last goes beside checkpoints
    let run = Run::start(FSDP, &[&["--max-steps", "100000", "--comm-timeout", "2"], &places[..]].concat());
    wait_until("it trains", || steps(&dir.path("m.jsonl")) > 2);
    send(Signal::STOP, run.ranks(2)[1]);
    run.end().stderr
}

fn ranks_with_different_ports(dir: &Dir) -> String {
    let start = |r: usize, port: &str| {
        let mut command = rank(command(FSDP, &["--max-steps", "1", "--init-timeout", "1"]), r, 2, dir);
        Run(command.env("MASTER_PORT", port).spawn().unwrap())
    };
    [start(0, "29534"), start(1, "29535")].map(|rank| rank.end().stderr).concat()
}

fn ranks_with_different_secrets(_: &Dir) -> String {
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port().to_string();
    let say = |rank: &str, secret: &str| {
        let names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "FLATSHARD_JOB_SECRET"];
        let values = [rank, rank, "2", "2", &port, secret];
        let get = |name: &str| names.iter().position(|n| *n == name).map(|i| values[i].to_string());
        let env = RankEnv::read(&get).unwrap().unwrap();
        exchange(&env, Duration::from_secs(2), || Ok([0; 128])).unwrap_err().to_string()
    };
    std::thread::scope(|scope| {
        let ranks = [("0", "the secret of one"), ("1", "the secret of another")];
        let said = ranks.map(|(rank, secret)| scope.spawn(move || say(rank, secret)));
        said.map(|rank| rank.join().unwrap()).concat()
    })
}

fn two_hosts_without_a_secret(dir: &Dir) -> String {
    let agent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port().to_string();
    let start = |r: usize| {
        let mut command = rank(command(FSDP, &["--max-steps", "1"]), r, 2, dir);
        command.env("LOCAL_RANK", "0").env("LOCAL_WORLD_SIZE", "1").env("MASTER_PORT", &port);
        Run(command.env("FLATSHARD_HOST_ID", format!("host{r}")).env_remove("FLATSHARD_JOB_SECRET").spawn().unwrap())
    };
    [0, 1].map(start).map(|rank| rank.end().stderr).concat()
}

/// All 16 above the first of a stretch that is free; somebody else may take one of them, which is as good.
fn a_job_that_is_there_already(dir: &Dir) -> String {
    let log = dir.arg("log");
    let start = || Run(rank(command(FSDP, &["--max-steps", "1", "--log-file", &log]), 0, 2, dir).spawn().unwrap());
    let _first = start();
    wait_until("the first waits for its peer", || {
        fs::read_to_string(&log).is_ok_and(|text| text.contains("rank 0 of 2"))
    });
    start().end().stderr
}

fn ports_that_are_taken(_: &Dir) -> String {
    let first = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port().min(u16::MAX - 40);
    let _taken: Vec<_> = (0..=40).map(|i| TcpListener::bind(("0.0.0.0", first + i))).collect();
    let port = first.to_string();
    let vars =
        [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_PORT", &port)];
    let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
    let env = RankEnv::read(&get).unwrap().unwrap();
    exchange(&env, Duration::from_secs(1), || Ok([0; 128])).unwrap_err().to_string()
}

fn half_of_the_variables(_: &Dir) -> String {
    let mut command = command(FSDP, &[]);
    Run(command.env("RANK", "0").spawn().unwrap()).end().stderr
}

fn copies_that_are_not_equal(dir: &Dir) -> String {
    let start = |r: usize| {
        let data = dir.arg(&format!("{r}.txt"));
        fs::write(&data, "the quick brown fox ".repeat(300 + r)).unwrap();
        let mut command = rank(command(FSDP, &["--dataset", &data, "--max-steps", "1"]), r, 2, dir);
        Run(command.env("FLATSHARD_CACHE_DIR", dir.path("cache")).spawn().unwrap())
    };
    [0, 1].map(start).map(|rank| rank.end().stderr).concat()
}

fn directories_of_their_own(dir: &Dir) -> String {
    let start = |r: usize| {
        let at = dir.path(&r.to_string());
        fs::create_dir(&at).unwrap();
        let mut command = rank(command(FSDP, &["--max-steps", "1", "--ckpt-dir", "ckpt"]), r, 2, dir);
        Run(command.current_dir(at).spawn().unwrap())
    };
    [0, 1].map(start).map(|rank| rank.end().stderr).concat()
}

fn a_second_job(dir: &Dir) -> String {
    let ckpt = dir.arg("ckpt");
    let first = ["--max-steps", "100000", "--ckpt-dir", &ckpt, "--metrics-path", &dir.arg("m.jsonl")];
    let first = Run::start(FSDP, &first);
    wait_until("the first one trains", || steps(&dir.path("m.jsonl")) > 0);
    let said = say(FSDP, &["--max-steps", "1", "--ckpt-dir", &ckpt]);
    drop(first);
    said
}

fn a_flipped_bit(dir: &Dir) -> String {
    let ckpt = dir.arg("ckpt");
    good(FSDP, &["--max-steps", "1", "--ckpt-dir", &ckpt]);
    let file = dir.path("ckpt/step-00000001/model.safetensors");
    let file = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let at = file.metadata().unwrap().len() - 999;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    say(FSDP, &["--max-steps", "2", "--ckpt-dir", &ckpt, "--resume", "auto"])
}

fn a_bit_of_one_replica() -> String {
    let options = common::options(&common::llama(), common::ddp(DType::F32), common::SGD);
    let sizes = MeshSizes { dp_replicate: 3, dp_shard: 1, sp: 1, tp: 1, ep: 1 };
    let said = common::mesh_ranks(sizes, |rank| {
        let mut engine = Engine::new(rank.device.clone(), &rank.mesh, &options)?;
        let mut verify = Verify::new(rank.device, &rank.mesh, engine.state().0, 1)?;
        let (store, optimizer) = engine.state();
        store.for_each_shard(&mut |shard| {
            let weights = shard.master.host::<f32>("test")?;
            weights[0] = if rank.rank == 1 { weights[0] + 1.0 } else { weights[0] };
            Ok(())
        })?;
        Ok(verify.after(1, store, optimizer).unwrap_err().to_string())
    });
    said[0].clone()
}

//! `cargo xtask nightly safeguards`: the seeds of simulated faults find each safeguard that is taken out of the core.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::outcome::Outcome;
use crate::workspace::Workspace;

/// A safeguard, and the changes of the core that take it out.
struct Safeguard {
    name: &'static str,
    /// Seeds from 0 on that must find it.
    seeds: u64,
    /// Files of `host/core/src`, each with a text and what takes its place. A file has the text once.
    changes: &'static [(&'static str, &'static str, &'static str)],
}

const ATTEMPT: (&str, &str, &str) = (
    "scheduler/receiving.rs",
    "        if incoming.attempt != notice.attempt {\n            return;\n        }\n        let Some(complete)",
    "        let Some(complete)",
);

const SAFEGUARDS: [Safeguard; 7] = [
    Safeguard {
        name: "fence",
        seeds: 100,
        changes: &[(
            "scheduler/peers.rs",
            "            return self.cut_off(now, peer, &gone(peer), actions);\n",
            "            self.cut_off(now, peer, &gone(peer), actions);\n            return self.writer_gone(peer, actions);\n",
        )],
    },
    Safeguard {
        name: "Drained, on decode",
        seeds: 100,
        changes: &[(
            "scheduler/ending.rs",
            "                let writes = self.peers.may_write(incoming.peer, incoming.session);\n                \
             (true, Some(incoming.peer).filter(|_| writes), true)\n",
            "                let _peer = incoming.peer;\n                (true, None, true)\n",
        )],
    },
    Safeguard {
        name: "Drained, on prefill",
        seeds: 500,
        changes: &[
            (
                "scheduler/sending.rs",
                "                self.retire(now, room, job, Ending::Early(vec![answer]), actions);\n",
                "                self.retire(now, room, job, Ending::Early(Vec::new()), actions);\n                \
                 self.answer_aborts(room, vec![answer], actions);\n",
            ),
            (
                "scheduler/sending.rs",
                "            if !leftovers.answer.contains(&answer) {\n                \
                 leftovers.answer.push(answer);\n            }\n            return;\n",
                "            let _ended = leftovers;\n            \
                 return self.answer_aborts(room, vec![answer], actions);\n",
            ),
        ],
    },
    Safeguard {
        name: "digest",
        seeds: 100,
        changes: &[(
            "integrity.rs",
            "lanes.iter().find(|lane| lane.sent != lane.found)",
            "lanes.iter().find(|_lane| false)",
        )],
    },
    Safeguard { name: "attempt of a part", seeds: 1_000, changes: &[ATTEMPT] },
    Safeguard {
        name: "attempt of a part and of its verification",
        seeds: 1_000,
        changes: &[
            ATTEMPT,
            (
                "scheduler/receiving.rs",
                "let (room, attempt) = (notice.room, notice.attempt);",
                "let (room, attempt) = (notice.room, incoming.attempt);",
            ),
        ],
    },
    Safeguard {
        name: "limit on silence",
        seeds: 2_000,
        changes: &[
            (
                "outbox.rs",
                "now.since(entry.first_sent.max(heard(entry.to))) >= write.saturating_add(patience)",
                "write > patience.saturating_mul(1 << 20) && now < heard(entry.to)",
            ),
            (
                "outbox.rs",
                "            _ => now.since(entry.first_sent) >= patience,\n",
                "            _ => false,\n",
            ),
        ],
    },
];

/// Takes out each safeguard in turn, in a copy of the sources, and runs the seeds.
pub fn check(workspace: &Workspace) -> Outcome {
    match check_all(workspace) {
        Ok(found) => Outcome::Passed(found.join(", ")),
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn check_all(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let most = SAFEGUARDS.iter().map(|one| one.seeds).max().unwrap_or_default();
    let none = Safeguard { name: "nothing", seeds: most, changes: &[] };
    let seed = find(workspace, &none)?;
    ensure!(seed.is_none(), "a seed fails with all safeguards in place: {}", seed.unwrap_or_default());
    let mut found = Vec::new();
    for safeguard in &SAFEGUARDS {
        let (name, seeds) = (safeguard.name, safeguard.seeds);
        let seed = find(workspace, safeguard)?;
        let seed = seed.with_context(|| format!("{seeds} seeds do not find that {name:?} is missing"))?;
        found.push(format!("{name} at seed {seed}"));
    }
    Ok(found)
}

/// Takes a safeguard out of a copy of the sources, and returns the first seed that fails.
fn find(workspace: &Workspace, safeguard: &Safeguard) -> anyhow::Result<Option<String>> {
    let copy = workspace.target.join("safeguards");
    let source = copy.join("source");
    copy_sources(workspace, &source)?;
    for (file, text, other) in safeguard.changes {
        let path = source.join("host/core/src").join(file);
        let old = fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
        ensure!(
            old.matches(text).count() == 1,
            "host/core/src/{file} does not have the code of the safeguard {:?} once: change nightly/safeguards.rs",
            safeguard.name
        );
        fs::write(&path, old.replace(text, other))
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    let own = Workspace { root: source, target: copy.join("target") };
    let mut build = own.cargo(&["build", "--release", "--package", "host-simulate", "--example", "faults"]);
    let built = build.status().context("cargo cannot be run")?.success();
    ensure!(built, "the core without {} does not build; see above", safeguard.name);
    let mut run = Command::new(own.target.join("release/examples/faults"));
    run.args(["0", &safeguard.seeds.to_string(), "1"]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = run.output().context("the seeds cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout);
    println!("without {}:\n{text}", safeguard.name);
    let case = text.split_once("--replay '").map(|(_, case)| case);
    Ok(case.and_then(|case| case.split([' ', '\'']).next()).map(str::to_owned))
}

/// Copies the files that git does not ignore. A file that is there with the same contents is left alone, so that less is built.
fn copy_sources(workspace: &Workspace, to: &Path) -> anyhow::Result<()> {
    let mut list = Command::new("git");
    let output = list
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(&workspace.root)
        .output()
        .context("git cannot be run")?;
    ensure!(output.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("a file has a name that is no UTF-8")?;
    for name in names.split('\0').filter(|name| !name.is_empty()) {
        let (old, new) = (workspace.root.join(name), to.join(name));
        // A file that was removed and not committed yet.
        let Ok(contents) = fs::read(&old) else { continue };
        if fs::read(&new).is_ok_and(|there| there == contents) {
            continue;
        }
        let folder = new.parent().unwrap_or(to);
        fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        fs::write(&new, contents).with_context(|| format!("{} cannot be written", new.display()))?;
    }
    Ok(())
}

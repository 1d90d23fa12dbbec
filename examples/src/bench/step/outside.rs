//! Contenders that are other programs, asked line by line.
//!
//! A program says `ready OPTIMIZER` when it can begin, so that one built before it knew the
//! optimizer is found out, or `cannot WHY` if what it is asked for is not to be had. Then, for
//! each line `run K`, it takes one step that does not count and `K` that do, and answers
//! `seconds S`: the time of those `K`, that of its slowest process. Between two lines it does
//! nothing. It ends with its input.
use std::{
    ffi::{OsStr, OsString},
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, unbounded};

use super::super::BenchError;

/// How long a program may take for its start, or for a block of steps.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// A program that runs beside this one, and ends with it.
#[derive(Debug)]
pub(super) struct Outside {
    name: String,
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Outside {
    /// Starts `program` and waits until it is ready to train by `optimizer`. A program that says
    /// why it cannot is given as that.
    ///
    /// # Errors
    ///
    /// [`BenchError::Outside`] if it cannot be started, or ends.
    pub(super) fn start(
        program: &OsStr,
        arguments: &[OsString],
        threads: usize,
        optimizer: &str,
    ) -> Result<Result<Self, String>, BenchError> {
        let name = program.to_string_lossy().into_owned();
        let failed = |what: String| BenchError::Outside {
            program: name.clone(),
            what,
        };
        let mut child = Command::new(program)
            .args(arguments)
            .env("RAYON_NUM_THREADS", threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let (lines, answers) = unbounded();
        if let Some(output) = child.stdout.take() {
            // Ends with the program, or when nobody listens any more.
            thread::spawn(move || {
                let all = BufReader::new(output).lines().map_while(Result::ok);
                all.map_while(|line| lines.send(line).ok()).for_each(drop);
            });
        }
        let outside = Self {
            name,
            orders: child.stdin.take(),
            child,
            answers,
        };
        let answer = outside.answer()?;
        match answer.split_once(' ') {
            Some(("ready", known)) if known == optimizer => Ok(Ok(outside)),
            Some(("cannot", why)) => Ok(Err(why.to_owned())),
            _ => Err(outside.failed(format!(
                "said \"{answer}\", where `ready {optimizer}` was due: is it of this version?"
            ))),
        }
    }

    /// Has it take `steps` steps, and gives the seconds of all of them.
    ///
    /// # Errors
    ///
    /// [`BenchError::Outside`] if it ends, or answers something else.
    pub(super) fn run(&mut self, steps: usize) -> Result<f64, BenchError> {
        let told = (self.orders.as_mut()).map(|orders| writeln!(orders, "run {steps}"));
        // A program that has gone says so by its answers' end.
        drop(told);
        let answer = self.answer()?;
        let seconds = answer.strip_prefix("seconds ").map(str::parse);
        match seconds {
            Some(Ok(seconds)) => Ok(seconds),
            _ => Err(self.failed(format!("said \"{answer}\", where `seconds S` was due"))),
        }
    }

    fn answer(&self) -> Result<String, BenchError> {
        let failed = |_| self.failed("ended, or said nothing for 300 s".to_owned());
        self.answers.recv_timeout(PATIENCE).map_err(failed)
    }

    fn failed(&self, what: String) -> BenchError {
        BenchError::Outside {
            program: self.name.clone(),
            what,
        }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        /// Time to end what it has started itself.
        const GRACE: Duration = Duration::from_secs(5);
        drop(self.orders.take());
        let asked = Instant::now();
        while let Ok(None) = self.child.try_wait() {
            if asked.elapsed() > GRACE {
                drop(self.child.kill());
                drop(self.child.wait());
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

//! Runs a program in a pseudo-terminal, controlled by its output.
#![allow(unreachable_pub, reason = "a module of tests")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long a test waits for a text before it fails and shows the output so far.
const PATIENCE: Duration = Duration::from_secs(180);

/// A running program and the terminal's other end.
pub struct Pty {
    child: Child,
    master: File,
    chunks: Receiver<Vec<u8>>,
    /// Output that was not waited for yet.
    unread: String,
    /// Bytes of an incomplete character.
    partial: Vec<u8>,
}

impl Drop for Pty {
    /// Leaves no program behind, whatever a test did not wait for.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Pty {
    /// Starts `command` as the leader of a new session with its own terminal.
    pub fn spawn(command: Command) -> Self {
        Self::with_columns(command, 200)
    }

    /// Like [`Pty::spawn`], in a terminal with this many columns.
    pub fn with_columns(mut command: Command, columns: u16) -> Self {
        let (mut master, mut slave) = (0, 0);
        let size = libc::winsize {
            ws_row: 50,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the descriptors are written to two integers and the size is read; no name
        // or settings are passed.
        let rc = unsafe { libc::openpty(&mut master, &mut slave, null_mut(), null(), &size) };
        assert_eq!(rc, 0, "openpty: {}", std::io::Error::last_os_error());
        for end in [master, slave] {
            // A program that held an end of its own or another's terminal would never see it close.
            // SAFETY: openpty succeeded, so both are open descriptors.
            let rc = unsafe { libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC) };
            assert_eq!(rc, 0, "fcntl: {}", std::io::Error::last_os_error());
        }
        // SAFETY: openpty succeeded, so both are open descriptors that nothing else owns.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let end = || Stdio::from(slave.try_clone().unwrap());
        command.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: setsid and ioctl are async-signal-safe and touch no memory of the parent.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY as _, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        drop(command); // it holds the terminal's end
        drop(slave);
        let mut reader = master.try_clone().unwrap();
        let (send, chunks) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The read fails once the program is gone.
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                if send.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Pty {
            child,
            master,
            chunks,
            unread: String::new(),
            partial: Vec::new(),
        }
    }

    /// Types bytes.
    pub fn send(&mut self, bytes: &[u8]) {
        self.master.write_all(bytes).unwrap();
        self.master.flush().unwrap();
    }

    /// Types a line.
    pub fn line(&mut self, text: &str) {
        self.send(text.as_bytes());
        self.send(b"\r");
    }

    /// Types a line once `prompt` is there: before that, the terminal is not in the mode that
    /// the line editor uses, and input can be lost.
    pub fn answer(&mut self, prompt: &str, text: &str) {
        self.wait_for(prompt);
        self.line(text);
    }

    /// Reads until `text` is printed; returns the output up to its end.
    pub fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.unread.find(text) {
                let rest = self.unread.split_off(at + text.len());
                return std::mem::replace(&mut self.unread, rest);
            }
            if !self.read(deadline) {
                panic!("expected {text:?}, found {:?}", self.unread);
            }
        }
    }

    /// Reads until `n` more bytes are printed.
    pub fn wait_bytes(&mut self, n: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.unread.len() < n {
            assert!(self.read(deadline), "found {:?}", self.unread);
        }
    }

    /// Waits for the end of the program.
    pub fn exit_code(mut self) -> i32 {
        let deadline = Instant::now() + PATIENCE;
        while self.read(deadline) {}
        let status = self.child.wait().unwrap();
        status
            .code()
            .unwrap_or_else(|| panic!("{status}: {:?}", self.unread))
    }

    /// Reads more output; false at its end or the deadline.
    fn read(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.chunks.recv_timeout(left) {
            Ok(bytes) => {
                self.partial.extend_from_slice(&bytes);
                let valid = match std::str::from_utf8(&self.partial) {
                    Ok(text) => text.len(),
                    Err(e) => e.valid_up_to(),
                };
                let rest = self.partial.split_off(valid);
                self.unread
                    .push_str(&String::from_utf8_lossy(&self.partial));
                self.partial = rest;
                true
            }
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                false
            }
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }
}

cd /tmp/snip; rm -rf P Q; mkdir P
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/tmp/revpkg
nice -n 19 /work/i3/.venv/bin/python intact.py 1 /tmp/snip/P/s
cp -a P Q; rm -f Q/s/namespace.db*; cp P/db Q/s/namespace.db; cp P/wal Q/s/namespace.db-wal
nice -n 19 /work/i3/.venv/bin/python intact.py 2 /tmp/snip/Q/s

# docker build -t lightering .
# docker run --gpus all lightering            trains, as the README's first command
# docker run lightering pytest                runs the tests
FROM python:3.12
WORKDIR /lightering
# First what changes rarely, so that a change of the code does not install all packages again.
COPY requirements.txt ./
COPY scripts/run.sh scripts/
RUN scripts/run.sh python --version
COPY . .
ENTRYPOINT ["scripts/run.sh"]
CMD ["python", "train.py", "offload=bounce_linear"]

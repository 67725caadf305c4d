# docker build -t lightering .
# docker run --gpus all -v "$PWD/outputs:/lightering/outputs" lightering      trains, as the README's first command
# docker run lightering pytest                                                runs the tests
FROM python:3.12
WORKDIR /lightering
# pip's cache would double the size of the image.
ENV PIP_NO_CACHE_DIR=1
# First what changes rarely, so that a change of the code does not install all packages again.
COPY requirements.txt requirements-dev.txt ./
COPY scripts/run.sh scripts/
RUN scripts/run.sh pytest --version
COPY . .
ENTRYPOINT ["scripts/run.sh"]
CMD ["python", "train.py", "offload=bounce_linear"]

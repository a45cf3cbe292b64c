{{- define "parley.name" -}}
{{- if contains "parley" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-parley" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "parley.labels" -}}
app.kubernetes.io/name: parley
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "parley.selector" -}}
app.kubernetes.io/name: parley
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "parley.clusterSecret" -}}
{{ .Values.clusterSecret | default (printf "%s-cluster" (include "parley.name" .)) }}
{{- end }}

{{- define "parley.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "parley.serverResources" -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml .Values.resources.limits | nindent 2 }}
  {{- if .Values.gpu.enabled }}
  {{ .Values.gpu.resource }}: {{ .Values.gpu.count | quote }}
  {{- end }}
{{- end }}

{{/* The pod of a server or an instance. Argument: dict of "root", "component" and "role" ("" without a cluster). With
"part", one of several pods with GPUs: "leader", which has the server and the head of Ray, or "worker". */}}
{{- define "parley.serverPod" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    {{- include "parley.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  annotations:
    {{- if and $values.metrics.annotations (not .role) (ne (default "" .part) "worker") }}
    prometheus.io/scrape: "true"
    prometheus.io/port: "8000"
    prometheus.io/path: /metrics
    {{- end }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: {{ include "parley.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq (default "" .part) "worker" }}
      command: [bash, -c, "exec ray start --address=$LWS_LEADER_ADDRESS:6379 --disable-usage-stats --block"]
      {{- else }}
      {{- if .part }}
      command: [bash, -c, 'ray start --head --port=6379 --disable-usage-stats && exec parley "$@"', parley]
      {{- end }}
      args:
        - serve
        {{- with $values.model }}
        - {{ . | quote }}
        {{- end }}
        - --host
        - {{ if .role }}$(POD_IP){{ else }}0.0.0.0{{ end }}
        - --port
        - "8000"
        - --drain
        - {{ $values.drain | quote }}
        {{- if .role }}
        - --role
        - {{ .role }}
        - --peer-port
        - "1121"
        {{- end }}
        {{- if .part }}
        - --engine=vllm
        - --engine-python=/usr/bin/python3
        {{- else if and $values.gpu.enabled (not (has "--engine" $values.arguments)) }}
        - --device
        - cuda
        {{- end }}
        {{- if and $values.keysSecret (not .role) }}
        - --api-key-file
        - /etc/parley/keys/keys.toml
        {{- end }}
        {{- range $values.arguments }}
        - {{ . | quote }}
        {{- end }}
        {{- if .part }}
        - --
        - --tensor-parallel-size={{ $values.gpu.count }}
        - --pipeline-parallel-size={{ $values.gpu.pods }}
        - --distributed-executor-backend=ray
        {{- range $values.gpu.vllmArguments }}
        - {{ . | quote }}
        {{- end }}
        {{- end }}
      {{- end }}
      env:
        - {name: HF_HOME, value: /models}
        {{- if .role }}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: PARLEY_CLUSTER_SECRET, valueFrom: {secretKeyRef: {name: {{ include "parley.clusterSecret" .root }}, key: secret}}}
        {{- end }}
        {{- if .part }}
        - {name: RAY_ADDRESS, value: auto}
        - {name: VLLM_HOST_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if ne (default "" .part) "worker" }}
      ports:
        - {name: http, containerPort: 8000}
        {{- if .role }}
        - {name: peer, containerPort: 1121}
        {{- end }}
      startupProbe: {httpGet: {path: /health/ready, port: http}, periodSeconds: 2, failureThreshold: 900}
      livenessProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 5, timeoutSeconds: 5}
      readinessProbe: {httpGet: {path: /health/ready, port: http}, periodSeconds: 2, timeoutSeconds: 5}
      lifecycle: {preStop: {exec: {command: [python, -c, "import time; time.sleep({{ $values.preStopSeconds }})"]}}}
      {{- end }}
      resources:
        {{- include "parley.serverResources" .root | nindent 8 }}
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: scratch, mountPath: /tmp}
        - {name: cache, mountPath: /home/parley/.cache}
        {{- if $values.gpu.enabled }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if and $values.keysSecret (not .role) }}
        - {name: keys, mountPath: /etc/parley/keys, readOnly: true}
        {{- end }}
  volumes:
    - name: models
      {{- if $values.models.persistence.enabled }}
      persistentVolumeClaim:
        claimName: {{ $values.models.persistence.existingClaim | default (printf "%s-models" (include "parley.name" .root)) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - {name: scratch, emptyDir: {}}
    - {name: cache, emptyDir: {}}
    {{- if $values.gpu.enabled }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.gpu.sharedMemory }}}}
    {{- end }}
    {{- if and $values.keysSecret (not .role) }}
    - {name: keys, secret: {secretName: {{ $values.keysSecret }}}}
    {{- end }}
{{- end }}
